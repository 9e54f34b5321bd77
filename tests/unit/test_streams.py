"""The random streams: the published generator, 62 uniform bits, and numbers that belong to a request."""

from __future__ import annotations

import json

import pytest
import torch

from vocab_parallel import Streams
from vocab_parallel.select.sampling import _scaled
from vocab_parallel.select.streams import philox

# Random123's kat_vectors: counter, key, result of philox4x32 with 10 rounds
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def int64(low, high):
    word = low | high << 32
    return torch.tensor([word - 2**64 if word >= 2**63 else word])


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_generator_is_philox4x32_10(counter, key, result):
    words = philox(int64(*key), [torch.tensor([word]) for word in counter])
    assert words[:, 0].tolist() == list(result)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_a_number_is_31_bits_of_each_of_the_first_two_words_at_key_seed_and_counter_draw_then_request(
    counter, key, result
):
    streams = Streams(int64(*key), int64(*counter[2:]), int64(*counter[:2]))
    assert streams.bits().tolist() == [(result[0] & 0x7FFFFFFF) << 31 | result[1] & 0x7FFFFFFF]


def test_numbers_are_uniform_in_62_bits_and_differ_by_seed_request_and_draw():
    streams = Streams.of([3] * 20_000, list(range(20_000)))
    unit = torch.cat([streams.bits(), streams.advanced().bits(), Streams.of(list(range(10, 20_010))).bits()])
    assert len(set(unit.tolist())) == 60_000
    assert int(unit.min()) >= 0 and int(unit.max()) < 2**62
    counts = torch.bincount(unit >> 56, minlength=64).double()
    assert ((counts - 60_000 / 64) ** 2 / (60_000 / 64)).sum() < 110, "chi-square of 63 degrees of freedom"
    ones = torch.stack([(unit >> bit) & 1 for bit in range(62)]).double().mean(1)
    assert float((ones - 0.5).abs().max()) < 0.012, "each bit is 1 in half the numbers"


def test_a_row_keeps_its_numbers_in_any_batch_and_after_a_pause():
    streams = Streams.of([1, 2, 3], ["a", "b", "c"])
    first = streams.bits()
    assert torch.equal(streams.rows(torch.tensor([2, 0])).bits(), first[[2, 0]])
    assert Streams.of([2], ["b"]).bits().tolist() == [int(first[1])]
    paused = streams.advanced(torch.tensor([True, False, True]))
    assert paused.draws.tolist() == [1, 0, 1]
    assert int(paused.bits()[1]) == int(first[1])


def test_few_rows_and_many_get_the_same_numbers():
    streams = Streams.of([2**64 - 1 - 7 * row for row in range(40)], [2**63 + row for row in range(40)]).advanced()
    for rows in (1, 5, 16, 17):
        assert torch.equal(streams.rows(torch.arange(rows)).bits(), streams.bits()[:rows])


def test_streams_come_back_from_json_as_they_were():
    streams = Streams.of([-1, 2**64 - 1, 7], [2**63, "name", 0]).advanced().advanced(torch.tensor([True, False, True]))
    again = Streams.from_state_dict(json.loads(json.dumps(streams.state_dict())))
    assert torch.equal(again.bits(), streams.bits()) and torch.equal(again.draws, streams.draws)


def test_children_of_one_parent_draw_apart_and_the_first_goes_on_with_the_parents():
    streams = Streams.of([1, 2]).advanced()
    children = streams.fork(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 1]))
    assert int(children.bits()[0]) == int(streams.bits()[0]) and int(children.draws[0]) == 1
    assert len(set(children.bits().tolist())) == 4
    again = streams.fork(torch.tensor([0]), torch.tensor([2]))
    assert int(again.bits()[0]) == int(children.bits()[2]), (
        "a child's numbers depend on parent, draw and its number only"
    )
    later = streams.advanced().fork(torch.tensor([0]), torch.tensor([2]))
    assert int(later.bits()[0]) != int(children.bits()[2])


def test_scaling_a_number_by_a_mass_loses_no_bit():
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2**62, (2000,), generator=draw)
    total = torch.randint(1, 2**62, (2000,), generator=draw) >> torch.randint(0, 61, (2000,), generator=draw)
    bits = torch.cat([bits, torch.tensor([0, 2**62 - 1, 2**62 - 1])])
    total = torch.cat([total.clamp(min=1), torch.tensor([2**62 - 1, 2**62 - 1, 1])])
    expected = [a * b >> 62 for a, b in zip(bits.tolist(), total.tolist(), strict=True)]
    assert _scaled(bits, total).tolist() == expected


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Streams.of([1, 2**64]), ("seed of row 1", str(2**64))),
        (lambda: Streams.of([1, 0.5]), ("seed of row 1", "0.5")),
        (lambda: Streams.of([True]), ("seed of row 0", "True")),
        (lambda: Streams.of([1, 2], [1]), ("2 seeds", "1 requests")),
        (lambda: Streams.of([1], [None]), ("request of row 0", "None")),
        (lambda: Streams.from_state_dict({"algorithm": "mt19937"}), ("mt19937",)),
        (lambda: Streams.from_state_dict(Streams.of([1]).state_dict() | {"draws": [1, 2]}), ("one length",)),
        (lambda: Streams.from_state_dict(Streams.of([1]).state_dict() | {"draws": [1.5]}), ("1.5",)),
    ],
)
def test_what_is_no_stream_is_a_value_error_that_names_it(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)
