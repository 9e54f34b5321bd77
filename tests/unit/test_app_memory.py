"""The memory measure counts what is alive, once, also inside autograd Functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ranks import run_ranks
from vocab_parallel.app.memory import peak_extra_bytes, peak_process_bytes


class Temporaries(torch.autograd.Function):
    """Needs 20,000 bytes and then 40,000 for a moment forward, 80,000 backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        first = torch.zeros(5_000)
        del first
        second = torch.zeros(10_000)
        del second
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        wide = torch.zeros(20_000)
        view = wide.view(2, -1).t()
        del wide, view
        return gradients[0] * 2


def test_one_result() -> None:
    x = torch.zeros(1_000)
    assert peak_extra_bytes(lambda: x + 1) == 4_000


def test_freed_results_make_room() -> None:
    x = torch.zeros(1_000)

    def chain() -> None:
        y = x + 1
        for _ in range(5):
            y = y * 2

    assert peak_extra_bytes(chain) == 8_000


def test_views_in_place_results_and_what_was_there_count_nothing() -> None:
    x = torch.zeros(1_000)
    assert peak_extra_bytes(lambda: x.view(10, 100).t().mul_(2).add_(x.view(100, 10).t().reshape(100, 10)[:1, :1])) == (
        x.view(100, 10).t().reshape(100, 10).nbytes
    )


def test_temporaries_inside_a_function_forward_and_backward() -> None:
    x = torch.zeros(1_000, requires_grad=True)
    assert peak_extra_bytes(lambda: Temporaries.apply(x)) == 40_000
    loss = Temporaries.apply(x).sum()
    assert 80_000 <= peak_extra_bytes(loss.backward) <= 80_000 + 3 * 4_000


def test_it_holds_nothing_alive_and_measures_again_the_same() -> None:
    x = torch.zeros(1_000)
    assert [peak_extra_bytes(lambda: x + 1) for _ in range(3)] == [4_000] * 3


def _hold(rank: int) -> None:
    before = peak_process_bytes()
    held = torch.ones(before // 4 + 10_000_000)
    assert peak_process_bytes() >= before + 4 * 10_000_000 and held[-1] == 1


def test_the_process_has_held_what_it_allocated() -> None:
    run_ranks(_hold, 1)  # in a process that has not held gigabytes already
