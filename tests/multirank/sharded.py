"""Runs a loss sharded over ranks and unsharded in the oracle, on the same whole tensors, and compares everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.multirank.loss_case import OUTPUTS, SPREADS, Case, both, local, shard_of, surrogate, whole
from tests.multirank.shared_world import Batch, two_sizes
from tests.tolerances import RELATIVE, bits, require_close, require_equal
from vocab_parallel import VocabShard, loss, reference

__all__ = [
    "OUTPUTS", "SPREADS", "TP", "Case", "Cases", "both", "call", "compare", "local", "oracle", "run_case", "shard_of",
    "unsharded", "whole",
]  # fmt: skip

TP = pytest.mark.parametrize("tp", [1, 2, 3, 4])
SOFTMAX_OPTIONS = ("softcap", "temperature", "ignore_index")


def call(case: Case, mine: dict[str, Tensor], shard: VocabShard, outputs: Any = None) -> Tensor:
    """The sharded loss of this rank's tensors; both results of `token_logprobs` as one tensor `[..., 2]`."""
    arguments, options = [mine["input"]], dict(case.options)
    if case.linear:
        arguments.append(mine["weight"])
        options |= {"linear_bias": mine.get("bias"), "sequence_parallel": case.spread is not None}
        options |= {"chunk_size": case.chunk_size}
    arguments.append(mine["target"])
    if case.function == "row_loss":
        arguments += [surrogate, mine["old"], mine["advantage"]]
    if case.weighted:
        options["row_weight"] = mine["row_weight"]
    if outputs is not None:
        options["outputs"] = outputs
    function = getattr(loss, ("linear_" if case.linear else "") + case.function)
    result = function(*arguments, shard=shard, **options, **case.execution)
    return torch.stack(tuple(result), -1) if case.function == "token_logprobs" else result


def run_case(rank: int, case: Case, group: Any = None) -> dict[str, Any]:
    """Loss and gradients of this rank, and whether the calls left their arguments as they were."""
    shard = shard_of(case.vocab, case.multiple_of, group)
    mine = local(case, whole(case), shard)
    before = {name: bits(tensor).clone() for name, tensor in mine.items()}
    for name in case.names:
        mine[name].requires_grad_(name not in case.frozen)
    collectors = [loss.RowOutputs(*case.outputs) if case.outputs else None for _ in range(2)]
    with torch.no_grad():
        silent = call(case, mine, shard, collectors[0])
    value = call(case, mine, shard, collectors[1])
    upstream = mine["upstream"].to(value.dtype)
    trained = [mine[name] for name in case.names if name not in case.frozen]
    names = [name for name in case.names if name not in case.frozen]
    result: dict[str, Any] = {"loss": value.detach().clone(), "no_grad": silent, "valid": shard.num_valid}
    result["outputs"] = [{name: getattr(one, name) for name in OUTPUTS} for one in collectors if one is not None]
    if trained:
        first = torch.autograd.grad(value, trained, upstream, retain_graph=True)
        first, given = [gradient.clone() for gradient in first], first
        for gradient in given:
            gradient.zero_()  # as clipping or an optimizer may: what is saved for the next backward must not be this
        second = torch.autograd.grad(value, trained, upstream)
        result |= {f"d_{name}": gradient for name, gradient in zip(names, first, strict=True)}
        result |= {f"again_{name}": gradient for name, gradient in zip(names, second, strict=True)}
    result["modified"] = [name for name, saved in before.items() if not torch.equal(bits(mine[name]), saved)]
    result["loss_after"] = value.detach().clone()
    return result


def oracle(case: Case) -> dict[str, Tensor]:
    """The same on whole tensors in float64."""
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in whole(case).items()}
    for name in case.names:
        tensors[name].requires_grad_(name not in case.frozen)
    scores = tensors["input"]
    if case.linear:
        scores = reference.logits(tensors["input"], tensors["weight"], tensors.get("bias"))
    value = unsharded(case, scores, tensors)
    result = {"loss": value.detach()}
    names = [name for name in case.names if name not in case.frozen]
    if names:
        gradients = torch.autograd.grad(value, [tensors[name] for name in names], tensors["upstream"])
        result |= {f"d_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    if case.outputs:
        ids = tensors["target"] if not case.soft else torch.zeros(case.leading, dtype=torch.int64)
        softmax = {name: case.options[name] for name in SOFTMAX_OPTIONS if name in case.options}
        rows = reference.row_outputs(scores.detach(), ids, **softmax)
        result |= {f"out_{name}": getattr(rows, name) for name in case.outputs}
    return result


def unsharded(case: Case, logits: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """The oracle's loss."""
    target, options = tensors["target"], dict(case.options)
    if case.weighted:
        options["row_weight"] = tensors["row_weight"]
    if case.function == "token_logprobs":
        return torch.stack(reference.token_logprobs(logits, target, **options), -1)
    if case.function == "row_loss":
        blind = case.execution.get("entropy") is False
        return reference.row_loss(
            logits, target, lambda rows, *data: surrogate(rows._replace(entropy=None) if blind else rows, *data),
            tensors["old"], tensors["advantage"], **options,
        )  # fmt: skip
    return getattr(reference, case.function)(logits, target, **options)


def compare(case: Case, ranks: list[dict[str, Any]], expected: dict[str, Tensor]) -> None:
    """Every rank against the oracle, and against each other where values are replicated."""
    for rank, result in enumerate(ranks):
        assert result["modified"] == [], f"rank {rank} modified its arguments {result['modified']}"
        for key in ("loss_after", "no_grad"):
            require_equal(f"{key} on rank {rank}", [result["loss"], result[key]])
        for name in case.names:
            if name not in case.frozen:
                require_equal(f"second backward, d_{name}", [result[f"d_{name}"], result[f"again_{name}"]])
                assert result[f"d_{name}"].dtype == case.dtype, f"d_{name} is {result[f'd_{name}'].dtype}"
        result |= _outputs(case, rank, result["outputs"])
    whole_values = {key: assemble(case, key, ranks) for key in expected}
    loss_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    assert whole_values["loss"].dtype == loss_dtype
    for key, value in whole_values.items():
        if key in ("out_argmax", "out_correct") and not case.exact_scores:
            require_choice(case, key, value)
        elif key in ("out_argmax", "out_correct"):
            require_equal(key, [expected[key].clone(memory_format=torch.contiguous_format), value])
        else:
            require_close(key, value, expected[key], case.dtype)


def _outputs(case: Case, rank: int, collected: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What a collector holds, by the keys of `oracle`: what was asked for, with and without grad the same, detached."""
    for name in OUTPUTS if collected else ():
        silent, value = (one[name] for one in collected)
        if name not in case.outputs:
            assert silent is None and value is None, f"{name} was not asked for: {value}"
            continue
        require_equal(f"output {name} without grad on rank {rank}", [value, silent])
        assert not value.requires_grad, f"output {name} is not detached"
        floating = torch.float64 if case.dtype == torch.float64 else torch.float32
        dtype = {"argmax": torch.int64, "correct": torch.bool}.get(name, floating)
        assert value.dtype == dtype, f"output {name} is {value.dtype}"
    return {f"out_{name}": collected[1][name] for name in case.outputs}


def require_choice(case: Case, key: str, got: Tensor) -> None:
    """Where scores are rounded: an argmax whose score is the largest, and correct rows, up to the rounding."""
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in whole(case).items()}
    logits = tensors["input"]
    if case.linear:
        logits = reference.logits(logits, tensors["weight"], tensors.get("bias"))
    scores = reference.scores(logits, case.options.get("softcap"), case.options.get("temperature", 1.0))
    finite = scores[scores.isfinite()].abs()
    slack = RELATIVE[case.dtype] * max(1.0, finite.max().item() if finite.numel() else 1.0)
    below = scores.amax(-1, keepdim=True) - scores
    if key == "out_argmax":
        assert bool((below.gather(-1, got[..., None]) <= slack).all()), f"{key}: {got} where scores are\n{scores}"
        return
    target, valid = tensors["target"], tensors["target"] != case.options.get("ignore_index", -100)
    target_below = below.gather(-1, torch.where(valid, target, 0)[..., None])[..., 0]
    others = below.scatter(-1, torch.where(valid, target, 0)[..., None], torch.inf).amin(-1)
    assert not bool((got & (~valid | (target_below > slack))).any()), f"{key}: {got} where scores are\n{scores}"
    assert not bool((~got & valid & (others > slack)).any()), f"{key}: {got} where scores are\n{scores}"


def assemble(case: Case, key: str, ranks: list[dict[str, Any]]) -> Tensor:
    """The whole tensor from the ranks' parts. Replicated ones must agree in every bit, padding must be zero."""
    parts = [result[key] for result in ranks]
    by_rows = case.spread is not None
    if key == "loss" or key.startswith("out_"):
        if by_rows and case.target_local and parts[0].dim():
            return torch.cat(parts)
    elif key == "d_input" and case.linear:
        if by_rows:
            return torch.cat(parts)
    else:
        dim = -1 if key == "d_input" else 0
        for rank, (part, result) in enumerate(zip(parts, ranks, strict=True)):
            padding = part.narrow(dim, result["valid"], part.shape[dim] - result["valid"])
            assert bool((padding == 0).all()), f"{key}: padding of rank {rank} has a gradient\n{padding}"
        return torch.cat([part.narrow(dim, 0, result["valid"]) for part, result in zip(parts, ranks, strict=True)], dim)
    require_equal(f"{key} (replicated)", parts)
    return parts[0]


class Cases(Batch):
    """Cases that are run on ranks together and compared with the oracle one by one.

    Attributes:
        each: Parametrizes a test with the cases.
        each_on_two: Likewise, each with two numbers of ranks. Then they run on no others.
    """

    def __init__(self, cases: list[Case], *, on_two: bool = False) -> None:
        super().__init__(run_case, [(case,) for case in cases], two_sizes if on_two else None)
        self.each = pytest.mark.parametrize("case", cases, ids=lambda case: case.name.replace(" ", "_"))
        self.each_on_two = pytest.mark.parametrize(
            ("case", "tp"),
            self.pairs() if on_two else [],
            ids=lambda one: getattr(one, "name", str(one)).replace(" ", "_"),
        )

    def check(self, case: Case, tp: int) -> list[dict[str, Any]]:
        """Compares one case on `tp` ranks with the oracle, and returns what the ranks had."""
        try:
            ranks = self(tp, case)
            compare(case, ranks, oracle(case))
        except AssertionError as error:
            raise AssertionError(f"{error}\non {tp} ranks: {case!r}") from None
        return ranks
