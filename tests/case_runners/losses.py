"""Both losses: values, gradients, errors, and what a call must leave alone."""

from __future__ import annotations

import functools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.batch import Attempt, assert_all_raise, attempt
from tests.case_runners.common import Expected, Ranks, differentiate, joined, replicated, same_bits
from tests.cases import Case, as_target, as_tensor, assert_close, local_part
from tests.multirank.counting import collectives
from vocab_parallel import (
    VocabLayout,
    VocabShard,
    cross_entropy,
    linear_cross_entropy,
)
from vocab_parallel.loss import linear_token_logprobs, token_logprobs


@dataclass(frozen=True)
class Variant:
    """One way to call the loss that a case has values for, all with reduction "none"."""

    name: str
    logits: Any
    target: Any
    options: dict[str, Any]
    loss: Any
    dlogits: Any = None


def loss_variants(case: Case, expect: Expected) -> list[Variant]:
    logits, target = case.inputs["logits"], case.inputs["target"]
    options = {key: case.params[key] for key in ("label_smoothing", "ignore_index") if key in case.params}
    variants = []
    if "loss" in expect:
        dlogits = expect.take("dlogits") if "dlogits" in expect else None
        variants.append(Variant("loss", logits, target, options, expect.take("loss"), dlogits))
    for over, formula in (("all", "pytorch"), ("others", "megatron")):
        if f"loss_{formula}_formula" in expect:
            key = f"dlogits_{formula}_formula"
            dlogits = expect.take(key) if key in expect else None
            loss = expect.take(f"loss_{formula}_formula")
            variants.append(Variant(over, logits, target, options | {"smoothing_over": over}, loss, dlogits))
    if "with_ignore_index_2" in expect:
        other = expect.take("with_ignore_index_2")
        variants.append(
            Variant("ignore 2", logits, other["target"], {"ignore_index": 2}, other["loss"], other["dlogits"])
        )
    if "row1_loss" in expect:  # the row without a finite logit is left out, in both ways
        loss, dlogits = expect.take("row1_loss"), expect.take("row1_dlogits")
        variants.append(Variant("row 1 alone", logits[1:], target[1:], options, loss, dlogits))
        ignored, zeros = [-100, *target[1:]], [[0.0] * len(dlogits[0]), *dlogits]
        variants.append(Variant("row 0 ignored", logits, ignored, options, [0.0, *loss], zeros))
    return variants


def check_call(what: str, dtype: str, seen: list[dict[str, Any]]) -> None:
    """What holds for any loss call: pure, repeatable, in the right dtypes."""
    assert all(one["second backward"] for one in seen), f"{what}: a second backward gives another gradient"
    assert all(one["inputs unchanged"] for one in seen), f"{what}: an argument was modified"
    loss_dtype = torch.float64 if dtype == "float64" else torch.float32
    assert {one["loss"].dtype for one in seen} == {loss_dtype}, what
    assert {grad.dtype for one in seen for grad in one["grads"]} == {getattr(torch, dtype)}, what


def reductions(case: Case) -> tuple[str, ...]:
    if "grad_output" in case.inputs:
        return ("none",)
    if "reduction" not in case.params:
        return ("none", "sum", "mean")
    named = case.params["reduction"]
    return ("none", named) if "loss" in case.expect and named != "none" else (named,)  # "loss" is of the rows


def observe_cross_entropy(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[Any, Any]:
    shard = ranks.shard(case)
    seen: dict[Any, Any] = {"num_valid": shard.num_valid}
    upstream = as_tensor(case.inputs["grad_output"]) if "grad_output" in case.inputs else None

    def local(logits: Any) -> torch.Tensor:  # padding columns are NaN: reading one would show
        return local_part(as_tensor(logits, dtype), 1, shard.shard_size, shard.rank)

    for variant in loss_variants(case, Expected(case)):
        target = as_target(variant.target)
        for reduction in reductions(case):
            call = functools.partial(cross_entropy, shard=shard, target=target, reduction=reduction, **variant.options)
            seen[variant.name, reduction] = differentiate(call, [local(variant.logits)], upstream)
    if "row0" in case.expect:
        logits, target = local(case.inputs["logits"]), as_target(case.inputs["target"])
        seen["row0"] = attempt(lambda: cross_entropy(logits, target, shard=shard))
    return seen


def check_cross_entropy(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[Any, Any]]) -> None:
    for variant in loss_variants(case, expect):
        rows = as_tensor(variant.loss)
        ignored = variant.options.get("ignore_index", -100)
        valid = sum(target != ignored for target in variant.target)
        for reduction in reductions(case):
            what = f"{case.id} {variant.name}, reduction {reduction}"
            calls = [one[variant.name, reduction] for one in seen]
            check_call(what, dtype, calls)
            wanted = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / valid}[reduction]
            loss = replicated(what, [call["loss"] for call in calls])
            assert_close(loss, wanted.tolist(), case, dtype, f"{what}: loss")
            if variant.dlogits is not None:
                grad = joined(what, case, 1, [call["grads"][0] for call in calls])
                wanted_grad = as_tensor(variant.dlogits) / (valid if reduction == "mean" else 1)
                assert_close(grad, wanted_grad.tolist(), case, dtype, f"{what}: gradient")
    if "row0" in expect:  # ours is the error on every rank
        expect.take("row0")
        assert_all_raise(case.id, [one["row0"] for one in seen], ["NonFiniteError"], ["row 0", "-inf"])
    if "input_after" in expect:  # each call above compared the bits
        assert expect.take("input_after") == "bit-identical to input"
        assert expect.take("second_backward") == "same dlogits (retain_graph)"
        p = as_tensor(case.inputs["logits"]).softmax(-1)
        assert_close(-(p * p.log()).sum(-1), expect.take("entropy_after"), case, "float64", "entropy")
    if f"shard_sizes_tp{tp}" in case.params:
        assert [one["num_valid"] for one in seen] == case.params[f"shard_sizes_tp{tp}"]


def observe_without_distributed(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[Any, Any]:
    assert not dist.is_initialized()
    with collectives() as (calls, _):
        seen = observe_cross_entropy(case, dtype, ranks)
    return seen | {"calls": calls.total()}


def check_without_distributed(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[Any, Any]]) -> None:
    assert tp == 1
    assert seen[0]["calls"] == 0
    check_cross_entropy(case, dtype, tp, expect, seen)


# (rows of the ranks, chunked): every way to hand rows to the fused loss meets both chunk sizes
ROW_MODES = (
    ("replicated", False),
    ("replicated", True),
    ("own rows, own targets", True),
    ("own rows, all targets", False),
)


def row_modes(tp: int) -> tuple[tuple[str, bool], ...]:
    return ROW_MODES[:2] if tp == 1 else ROW_MODES


def observe_linear(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[Any, Any]:
    shard = ranks.shard(case)
    hidden, weight = as_tensor(case.inputs["hidden"], dtype), as_tensor(case.inputs["weight"], dtype)
    target = as_target(case.inputs["target"])
    upstream = as_tensor(case.inputs["grad_output"]) if "grad_output" in case.inputs else None
    weight = local_part(weight, 0, shard.shard_size, shard.rank)
    options = {key: case.params[key] for key in ("ignore_index", "softcap") if key in case.params}
    mine = rows_of(len(hidden), ranks)
    # N06's 1,024 chunks once, not in every mode.
    file_chunk = case.params.get("chunk_tokens", 2)
    seen: dict[Any, Any] = {}
    for mode, chunked in row_modes(ranks.tp):
        own_rows, own_targets = mode != "replicated", mode == "own rows, own targets"
        chunk_size = max(2, len(hidden) // 2) if own_rows else file_chunk
        for reduction in reductions(case):
            call = functools.partial(
                linear_cross_entropy,
                target=target[mine] if own_targets else target,
                shard=shard,
                reduction=reduction,
                sequence_parallel=own_rows,
                chunk_size=chunk_size if chunked else None,
                **options,
            )
            grad = upstream[mine] if own_targets and upstream is not None else upstream
            seen[mode, chunked, reduction] = differentiate(call, [hidden[mine] if own_rows else hidden, weight], grad)
    return seen


def rows_of(count: int, ranks: Ranks) -> slice:
    share = math.ceil(count / ranks.tp)
    return slice(min(ranks.tp_rank * share, count), min((ranks.tp_rank + 1) * share, count))


def linear_values(case: Case, expect: Expected) -> dict[str, dict[str, Any]]:
    """reduction -> {"loss": value, "dhidden": value, "dweight": value}, as far as the case has them."""
    values: dict[str, dict[str, Any]] = {reduction: {} for reduction in reductions(case)}
    for key, name in (("loss", "none"), ("loss_none", "none"), ("loss_sum", "sum"), ("loss_mean", "mean")):
        if key in expect:
            values[name]["loss"] = expect.take(key)
    if "loss" in case.expect and "sum" in values:
        values["sum"].setdefault("loss", as_tensor(case.expect["loss"]).sum().item())
    for quantity in ("dhidden", "dweight"):
        if f"{quantity}_mean" in expect:
            values["mean"][quantity] = expect.take(f"{quantity}_mean")
        elif quantity in expect:  # of the reduction the case names, or of every one
            value = expect.take(quantity)
            for reduction in values:
                values[reduction][quantity] = value
    if "loss_none_shape" in expect:
        values["none"]["loss"] = {"fill": 0.0, "shape": expect.take("loss_none_shape")}
        values["none"]["dhidden"] = {"fill": 0.0, "shape": expect.take("dhidden_shape")}
    return values


def check_linear(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[Any, Any]]) -> None:
    values = linear_values(case, expect)
    assert any(values.values())
    for key in ("grad_is_None", "grad_of_padding_rows"):  # looked at in every call
        if key in expect:
            assert not expect.take(key)
    for mode, chunked in row_modes(tp):
        for reduction, wanted in values.items():
            what = f"{case.id}, {mode}, {'in chunks' if chunked else 'whole'}, reduction {reduction}"
            calls = [one[mode, chunked, reduction] for one in seen]
            check_call(what, dtype, calls)
            losses, dhidden = [call["loss"] for call in calls], [call["grads"][0] for call in calls]
            own_losses = mode == "own rows, own targets" and reduction == "none"
            loss = torch.cat(losses) if own_losses else replicated(f"{what}: loss", losses)
            dh = replicated(f"{what}: dhidden", dhidden) if mode == "replicated" else torch.cat(dhidden)
            dw = joined(f"{what}: dweight", case, 0, [call["grads"][1] for call in calls])
            for quantity, value in (("loss", loss), ("dhidden", dh), ("dweight", dw)):
                if quantity in wanted:
                    assert_close(value, wanted[quantity], case, dtype, f"{what}: {quantity}")


def logprob_shapes(case: Case) -> list[list[int]]:
    """The shapes of the logits that the case has values for."""
    return case.expect.get("same_for", [list(as_tensor(case.inputs["logits"]).shape)])


def observe_logprobs(case: Case, dtype: torch.dtype, ranks: Ranks) -> list[dict[str, Any]]:
    """Of the logits, and through a projection that gives those logits: the unit matrix."""
    shard = ranks.shard(case)
    logits = as_tensor(case.inputs["logits"], dtype)
    target = as_target(case.inputs.get("target", [0] * len(logits)))
    unit = local_part(torch.eye(logits.shape[-1], dtype=dtype), 0, shard.shard_size, shard.rank)
    options = {"ignore_index": case.params["ignore_index"]} if "ignore_index" in case.params else {}
    seen = []
    for shape in logprob_shapes(case):
        ids, local = target.view(shape[:-1]), local_part(logits, 1, shard.shard_size, shard.rank)
        given = functools.partial(token_logprobs, target=ids, shard=shard, **options)
        chunk_size = case.params.get("chunk_tokens", 2)
        projected = functools.partial(
            linear_token_logprobs, linear_weight=unit, target=ids, shard=shard, chunk_size=chunk_size, **options
        )
        for call, leaf in ((given, local.view(*shape[:-1], -1)), (projected, logits.view(shape))):
            for output in (0, 1):
                seen.append(differentiate(lambda x, call=call, output=output: call(x)[output], [leaf]))
    return seen


def check_logprobs(case: Case, dtype: str, tp: int, expect: Expected, seen: list[list[dict[str, Any]]]) -> None:
    names = ("logprob", "entropy")
    values = {name: expect.take(name) for name in names if name in expect}
    slopes = {name: expect.take(f"dlogits_of_sum_{name}") for name in names if f"dlogits_of_sum_{name}" in expect}
    for at, shape in enumerate(logprob_shapes(case)):
        for form in (0, 1):
            for output, name in enumerate(names):
                what = f"{name} of {['logits', 'the projection'][form]} of shape {shape}"
                calls = [one[4 * at + 2 * form + output] for one in seen]
                check_call(what, dtype, calls)
                value = replicated(what, [call["loss"] for call in calls])
                grads = [call["grads"][0].flatten(0, -2) for call in calls]
                if name in values:
                    assert list(value.shape) == shape[:-1], what
                    assert_close(value.flatten(), values[name], case, dtype, what)
                if name in slopes:
                    grad = replicated(what, grads) if form else joined(what, case, 1, grads)
                    assert_close(grad, slopes[name], case, dtype, f"{what}: gradient")
    if "same_for" in expect:
        expect.take("same_for")


def observe_misuse(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    shard = ranks.shard(case)
    whole, target = as_tensor(case.inputs["local_logits_every_rank"], dtype), as_target(case.inputs["target"])
    right = functools.partial(cross_entropy, target=target, shard=shard)
    return {
        "error": attempt(lambda: cross_entropy(whole, target, shard=shard)),
        "right": differentiate(right, [local_part(whole, 1, shard.shard_size, shard.rank)]),
    }


def check_misuse(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    assert expect.take("raises") == "ValueError"
    assert expect.take("all_ranks") is True
    assert_all_raise(case.id, [one["error"] for one in seen], ["LayoutMismatchError"], ["[1, 4]", "gathered"])
    calls = [one["right"] for one in seen]
    check_call(case.id, dtype, calls)
    loss = replicated(case.id, [call["loss"] for call in calls])[None]
    assert_close(loss, expect.take("correct_loss"), case, dtype, "loss")
    grad = joined(case.id, case, 1, [call["grads"][0] for call in calls])
    assert_close(grad, expect.take("correct_dlogits"), case, dtype, "gradient")


def observe_loss_error(case: Case, dtype: torch.dtype, ranks: Ranks) -> Attempt:
    if "logits" in case.inputs:
        shard = ranks.shard(case)
        logits = local_part(as_tensor(case.inputs["logits"], dtype), 1, shard.shard_size, shard.rank)
        target = as_target(case.inputs["target"])
    else:
        rows, vocab = case.inputs["logits_shape"]
        shard = ranks.shard(case, vocab)
        logits = torch.zeros(rows, shard.shard_size, dtype=dtype)
        target = torch.zeros(case.inputs["target_shape"], dtype=torch.int64)
    options = {key: case.params[key] for key in ("ignore_index",) if key in case.params}
    return attempt(lambda: cross_entropy(logits, target, shard=shard, **options))


def check_loss_error(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Attempt]) -> None:
    assert "ValueError" in expect.take("raises")
    assert expect.take("all_ranks") is True
    names = expect.take("message_names")
    if names == ["both shapes"]:
        rows, vocab = case.inputs["logits_shape"]
        words, kinds = [f"[{rows}, {vocab // tp}]", str(case.inputs["target_shape"])], ["LayoutMismatchError"]
    else:
        assert names == ["the offending id", "the valid range"]
        words, kinds = [str(case.inputs["target"][1]), f"[0, {case.vocab_size()})", "row 1"], ["TargetRangeError"]
    assert_all_raise(case.id, seen, kinds, words)


def check_large(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    """Runs in this process: 4 GiB of logits and as much of gradient."""
    if available_memory() < 10 << 30:
        pytest.skip("needs 10 GiB of free memory")
    assert "last row's loss and gradient equal the same row computed alone" in expect.take("property")
    rows, vocab = 16_400, 131_072
    assert (rows - 1) * vocab > 2**31
    shard = VocabShard(VocabLayout(vocab, tp))
    last = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    logits = torch.zeros(rows, vocab, dtype=last.dtype)
    logits[-1:] = last
    target = torch.arange(rows) % vocab
    target[-1] = vocab - 1
    loss = functools.partial(cross_entropy, shard=shard, reduction="none")
    alone = differentiate(functools.partial(loss, target=target[-1:]), [last])
    logits.requires_grad_()
    rows_loss = loss(logits, target)
    rows_loss.sum().backward()
    assert same_bits(rows_loss[-1:].detach(), alone["loss"])
    assert same_bits(logits.grad[-1:], alone["grads"][0])
    torch.testing.assert_close(rows_loss[:-1], torch.full((rows - 1,), math.log(vocab)))


def available_memory() -> int:
    """Bytes a new process can have, or without /proc all of the machine's."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 1024 * int(path.read_text().split("MemAvailable:")[1].split()[0])


def observe_loss_scale(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, torch.Tensor]:
    shard = ranks.shard(case)
    loss = cross_entropy(torch.zeros(2, shard.shard_size, dtype=dtype), torch.tensor([0, 151_935]), shard=shard)
    logged = loss.clone()
    dist.all_reduce(logged)
    return {"loss": loss, "logged": logged / ranks.world}


def check_loss_scale(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, torch.Tensor]]) -> None:
    wanted = expect.take("logged_loss")
    assert wanted == case.inputs["loss_of_uniform"]
    for one in seen:  # each rank's loss is the loss of the batch, so their mean is too
        assert_close(one["loss"], wanted, case, dtype, "loss")
        assert_close(one["logged"], wanted, case, dtype, "mean over the ranks")
