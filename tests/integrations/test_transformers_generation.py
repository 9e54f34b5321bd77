"""Text from converted models by a policy: the ids of one process at any number of ranks, and no gather of logits."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessorList

from tests.integrations.transformers_models import build, make_shard
from tests.multirank.counting import collectives
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.transforms.log_softmax import Normalize
from vocab_parallel.decode.transforms.processors import NoRepeatNgram, RepetitionPenalty
from vocab_parallel.decode.transforms.warpers import MinP, Temperature, TopK, TopP
from vocab_parallel.errors import LayoutMismatchError
from vocab_parallel.integrations import transformers as vp
from vocab_parallel.select.streams import Streams

VOCAB, NEW = 19, 6
FAMILIES = ["llama", "gpt2", "gemma2", "cohere", "granite", "phi", "opt", "mixtral"]
GREEDY = Policy((), selector="greedy")
DRAWN = Policy((RepetitionPenalty(1.2), Temperature(1.5), TopK(12), TopP(0.95), MinP(0.02)))
PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8]]


def padded(prompts, side="left", pad=0):
    """Ids and mask of prompts of different lengths."""
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), pad), torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = torch.tensor(prompt), 1
    return ids, mask


def streams(rows=(0, 1, 2)):
    return Streams.of([7] * len(rows), [f"request {row}" for row in rows])


def ends_of(sequences):
    """An id that ends the first row in the middle; other rows as it comes."""
    return int(sequences[0, len(PROMPTS[0]) + NEW // 2])


def model_of(family):
    changes = {"output_router_logits": False} if family == "mixtral" else {}  # or its own generate fails
    return build(family, VOCAB, **changes).eval()


def convert(model, multiple_of=1):
    vp.apply(model, shard=make_shard(VOCAB, multiple_of), prove=False)
    return model


def plain_generate(model, ids, mask, eos=None, **options):
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": eos, **options}
    return model.generate(ids, attention_mask=mask, **settings)


def _case(rank, name, *rest):
    return globals()[f"_{name}"](rank, *rest)


SIZES = {
    **{("family", family): (1, 2, 4) if family in ("llama", "gemma2") else (1, 2) for family in FAMILIES},
    ("rows", "llama"): (1, 2, 4), ("rows", "gpt2"): (1, 2, 4), ("beams", None): (1, 2, 4), ("beams", 11): (1, 2, 4),
    ("details",): (1, 2), ("bytes",): (2,), ("bad",): (2,), ("misuse",): (1,),
}  # fmt: skip
WORLDS = Batch(_case, list(SIZES), SIZES.__getitem__)


def _family(rank, family):
    """Our loop and the processor inside `model.generate`, greedy and drawn, with and without an end id."""
    model = model_of(family)
    ids, mask = padded(PROMPTS)
    whole = plain_generate(model, ids, mask)
    eos = ends_of(whole)
    expected = [whole, plain_generate(model, ids, mask, eos)]
    convert(model, 8)
    result = {"greedy": expected, "ours": [], "processor": [], "drawn": [], "drawn by processor": []}
    for policy, random, end, ours, theirs in (
        (GREEDY, None, None, "ours", "processor"),
        (GREEDY, None, eos, "ours", "processor"),
        (DRAWN, streams(), eos, "drawn", "drawn by processor"),
    ):
        options = {"attention_mask": mask, "eos_token_id": [] if end is None else end, "pad_token_id": 0}
        made = vp.generate(model, ids, policy=policy, streams=random, max_new_tokens=NEW, **options)
        processor = vp.PolicyProcessor(policy, random, attention_mask=mask, eos_token_id=end)
        result[ours].append(made.sequences)
        result[theirs].append(plain_generate(model, ids, mask, end, logits_processor=LogitsProcessorList([processor])))
    return result


@pytest.mark.parametrize(("family", "tp"), [(name, tp) for name in FAMILIES for tp in SIZES["family", name]])
def test_a_family_gives_the_ids_of_model_generate_and_of_one_process(family, tp):
    [one] = WORLDS(1, "family", family)
    for rank in WORLDS(tp, "family", family):
        for mine, theirs in (("ours", "greedy"), ("processor", "greedy"), ("drawn by processor", "drawn")):
            for found, expected in zip(rank[mine], rank[theirs], strict=True):
                assert torch.equal(found, expected), (mine, found, expected)
        for name in one:
            same = [torch.equal(found, expected) for found, expected in zip(rank[name], one[name], strict=True)]
            assert all(same), name
        assert not torch.equal(rank["ours"][1], rank["drawn"][0]), "something must be drawn"


def _rows(rank, family):
    """A float64 model, so that rounding of other shapes in its trunk decides nothing: each row in several batches."""
    model = convert(model_of(family).double())
    ids, mask = padded(PROMPTS[:1])
    made = vp.generate(model, ids, policy=DRAWN, streams=streams([0]), max_new_tokens=4, eos_token_id=[])
    eos, found = int(made.token_ids[0, -1]), {}
    for name, rows, side in (
        ("left", [0, 1, 2], "left"), ("right", [0, 1, 2], "right"), ("other order", [2, 0, 1], "left"),
        ("two", [1, 0], "right"), ("alone", [0], "left"), ("alone", [1], "left"), ("alone", [2], "left"),
    ):  # fmt: skip
        ids, mask = padded([PROMPTS[row] for row in rows], side, pad=-100 if side == "right" else 0)
        made = vp.generate(
            model, ids, policy=DRAWN, streams=streams(rows), max_new_tokens=NEW, attention_mask=mask, eos_token_id=eos
        )
        for at, row in enumerate(rows):
            length = int(made.lengths[at])
            draws = int(made.state.streams.draws[at])
            found.setdefault(row, {})[name] = (made.token_ids[at, :length], made.logprobs[at, :length], draws)
    return found, eos


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_rows_tokens_depend_neither_on_its_batch_nor_on_the_side_of_the_padding(family, tp):
    ended = []
    for found, eos in WORLDS(tp, "rows", family):
        for row, batches in found.items():
            ids, logprobs, draws = batches["alone"]
            assert draws == len(ids), "one number a token, none after the end"
            ended.append(int(ids[-1]) == eos and len(ids) < NEW)
            for name, (other, of_other, drawn) in batches.items():
                assert torch.equal(other, ids), (row, name)
                assert drawn == draws
                assert torch.allclose(of_other, logprobs, rtol=0, atol=1e-9)
    assert any(ended) and not all(ended), "some rows must end early"


def _details(rank):
    """Streamer, logprobs, a continued stream, and what is traced."""
    model = model_of("llama")
    ids, mask = padded(PROMPTS)
    plain = copy.deepcopy(model)
    convert(model)

    class Streamer:
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got.append(value)

        def end(self):
            self.got.append("end")

    streamer = Streamer()
    options = {"policy": DRAWN, "attention_mask": mask, "eos_token_id": []}
    made = vp.generate(model, ids, streams=streams(), max_new_tokens=NEW, streamer=streamer, trace=True, **options)
    assert torch.equal(torch.cat([streamer.got[0], *(one[:, None] for one in streamer.got[1:-1])], 1), made.sequences)
    assert streamer.got[-1] == "end"
    assert [list(one.draw) for one in made.trace] == [[step] * 3 for step in range(NEW)]
    first = vp.generate(model, ids, streams=streams(), max_new_tokens=3, **options)
    more = torch.cat([mask, torch.ones(3, 3, dtype=torch.int64)], 1)
    options["attention_mask"] = more
    second = vp.generate(model, first.sequences, streams=first.state.streams, max_new_tokens=NEW - 3, **options)
    assert torch.equal(second.sequences, made.sequences), "the streams go on where they stopped"
    greedy = vp.generate(model, ids, policy=GREEDY, attention_mask=mask, eos_token_id=[], max_new_tokens=2)
    logits = plain(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, -1]
    expected = logits.double().log_softmax(-1).amax(1)
    assert torch.allclose(greedy.logprobs[:, 0], expected, rtol=0, atol=1e-6)


def _data_parallel(rank):
    """The vocabulary over data-parallel ranks: given one batch they write it together."""
    model = model_of("llama")
    ids, mask = padded(PROMPTS)
    expected = plain_generate(model, ids, mask)
    vp.apply(model, shard=make_shard(VOCAB), data_parallel=True, prove=False)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    options = {"policy": GREEDY, "max_new_tokens": NEW, "eos_token_id": [], "attention_mask": mask}
    assert torch.equal(vp.generate(wrapped, ids, **options).sequences, expected)
    with pytest.raises(LayoutMismatchError, match="passed different token ids"):
        vp.generate(model, ids.roll(rank, 1), **options)


def test_data_parallel_ranks_write_one_batch_together_and_refuse_different_ones():
    run_ranks(_data_parallel, 2, detail=False)


@pytest.mark.parametrize("tp", [1, 2])
def test_streamer_trace_logprobs_and_continued_streams(tp):
    WORLDS(tp, "details")


def _beams(rank, eos):
    model = model_of("llama")
    ids, mask = padded(PROMPTS)
    policy = Policy((Normalize(), RepetitionPenalty(1.3), NoRepeatNgram(2)))
    cases = [  # rows, options, and those that only one of the two has
        (3, {"num_beams": 3}, {}, {}),
        (3, {"num_beams": 4, "length_penalty": 2.0, "num_return_sequences": 2}, {}, {}),
        (3, {"num_beams": 2, "length_penalty": -1.0, "early_stopping": True}, {}, {}),
        (1, {"num_beams": 3}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},  # to which padding is history
         {"policy": policy, "renormalize": False}),
    ]  # fmt: skip
    asked = {"return_dict_in_generate": True, "output_scores": True}
    expected = [
        plain_generate(model, ids[:rows], mask[:rows], eos, **asked, **both, **theirs)
        for rows, both, theirs, _ in cases
    ]
    convert(model)
    given = {"max_new_tokens": NEW, "eos_token_id": [] if eos is None else eos, "pad_token_id": 0}
    found = [
        vp.beam_search(model, ids[:rows], attention_mask=mask[:rows], **given, **both, **ours)
        for rows, both, _, ours in cases
    ]
    return [
        (mine.sequences, theirs.sequences, mine.scores, theirs.sequences_scores)
        for mine, theirs in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("eos", [None, 11])
def test_beams_are_those_of_model_generate(eos, tp):
    for rank in WORLDS(tp, "beams", eos):
        for mine, theirs, score, expected in rank:
            assert torch.equal(mine, theirs)
            assert torch.allclose(score, expected.double(), rtol=0, atol=1e-5)


def _bytes(rank):
    """Bytes that a rank sends for one more token of 4 rows, once the sizes of the exchanges have settled."""
    model = build("llama", 4_001).eval()
    vp.apply(model, shard=make_shard(4_001), prove=False)
    ids = torch.randint(0, 4_001, (4, 5), generator=torch.Generator().manual_seed(0))
    sent = {}
    for name, policy, random in (("greedy", GREEDY, None), ("drawn", Policy((Temperature(0.7), TopK(20))), 7)):
        counts = []
        for length in (20, 20, 21):
            seeds = None if random is None else Streams.of([random] * 4, [0, 1, 2, 3])
            with collectives() as (calls, sizes):
                vp.generate(model, ids, policy=policy, streams=seeds, max_new_tokens=length, eos_token_id=[])
            counts.append((calls.total(), sizes.total()))
        sent[name] = counts[2][1] - counts[1][1]
    return sent


def test_no_logits_are_gathered():
    rows, width, whole = 4, 16, 4 * 2_001 * 4  # what a gather of the logits sends for a token
    for sent in WORLDS(2, "bytes"):
        lookup = 64 + rows * width * 4
        assert sent["greedy"] <= lookup + 64 + rows * 16
        assert sent["drawn"] <= lookup + 64 + rows * 8 * 20
        assert sent["drawn"] < whole / 20


def _bad(rank):
    model = model_of("llama")
    cases = {}

    def attempt(name, *args, **kwargs):
        options = {"policy": GREEDY, "max_new_tokens": 2, "eos_token_id": []} | kwargs
        try:
            vp.generate(*args, **options)
            cases[name] = "nothing"
        except Exception as error:
            cases[name] = f"{type(error).__name__}: {error}"

    ids, mask = padded(PROMPTS)
    attempt("plain", model, ids)
    convert(model)
    attempt("other prompts", model, ids + (rank == 1))
    attempt("out of range", model, torch.where(torch.arange(6) == 4, VOCAB, ids) if rank == 1 else ids)
    attempt("empty row", model, ids, attention_mask=mask * torch.tensor([[1], [0], [1]]))
    attempt("shape", model, ids, attention_mask=mask[:, 1:])
    attempt("no streams", model, ids, policy=DRAWN)
    attempt("other streams", model, ids, policy=DRAWN, streams=streams([0, 1]))
    attempt("no tokens", model, ids, max_new_tokens=0)
    attempt("eos", model, ids, eos_token_id=VOCAB)
    attempt("other length", model, ids, max_new_tokens=2 + rank)
    attempt("float ids", model, ids.float())
    attempt("fine", model, ids, attention_mask=mask)
    return cases


BAD = {
    "plain": "ConfigError: this LlamaForCausalLM is not converted",
    "other prompts": "LayoutMismatchError: rank 0 and rank 1 of the group passed different token ids",
    "out of range": "TokenRangeError: input_ids[0, 4] is 19, outside [0, 19)",
    "empty row": "ValueError: row 1 has no token",
    "shape": "LayoutMismatchError: attention_mask [3, 5] and input_ids [3, 6] must have one shape",
    "no streams": "ValueError: a policy that samples needs streams",
    "other streams": "ValueError: streams of 2 rows",
    "no tokens": "ValueError: max_new_tokens must be an integer of at least 1, got 0",
    "eos": "TokenRangeError: eos_token_id 19 is outside [0, 19)",
    "other length": "LayoutMismatchError: the ranks of the group disagree",
    "float ids": "LayoutMismatchError: input_ids must be int64",
    "fine": "nothing",
}


def test_bad_arguments_are_the_same_error_on_every_rank():
    first, second = WORLDS(2, "bad")
    assert first == second
    assert first.keys() == BAD.keys()
    for name, words in BAD.items():
        assert first[name].startswith(words), (name, first[name])


def _misuse(rank):
    model = convert(model_of("llama"))
    ids, mask = padded(PROMPTS)
    caught = []
    ends = {"eos": ends_of(plain_generate(model, ids, mask))}
    draws = {"do_sample": True, "temperature": 50.0, "top_k": 0}
    for options in (draws, {"num_beams": 2}, ends, {"policy": DRAWN}, {}):
        processor = vp.PolicyProcessor(options.pop("policy", GREEDY), attention_mask=mask)
        handed = LogitsProcessorList([processor])
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                plain_generate(model, ids, mask, logits_processor=handed, **options)
            if not options:  # a second call of one object
                plain_generate(model, ids, mask, logits_processor=handed)
            caught.append("nothing")
        except ValueError as error:
            caught.append(str(error))
    return caught


def test_a_processor_that_generate_does_not_follow_says_so():
    sampled, beams, ended, no_streams, again = WORLDS(1, "misuse")[0]
    assert sampled == "nothing", "one legal id: sampling takes it too"
    assert "one beam" in beams
    assert "model.generate took 0. If the row had ended there, give the processor the same eos_token_id" in ended
    assert "a policy that samples needs streams" in no_streams
    assert "serves one call" in again


def test_the_pages_lines_run_as_written():
    page = Path("docs/hosts/transformers.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- text -->\n```python\n(.*?)```", page, re.S)
    model = build("llama", 300, max_position_embeddings=128).eval()
    vp.apply(model, shard=VocabShard(VocabLayout(300, 1)))
    ids = torch.randint(0, 300, (2, 5))
    names = {"model": model, "vp": vp, "input_ids": ids, "mask": torch.ones_like(ids), "request_names": ["a", "b"]}
    exec(block, names)
    assert names["made"].sequences.shape == names["best"].sequences.shape == (2, 69)
