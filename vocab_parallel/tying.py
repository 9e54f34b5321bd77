"""Tied weights: one Parameter with two uses or more, kept one and proved one.

One object means one gradient buffer with all contributions, one set of optimizer moments, one term in the gradient
norm and one key in a checkpoint. Two Parameters on one storage look tied and are not: optimizers and loaders treat
them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel.embedding import VocabParallelEmbedding
from vocab_parallel.errors import TyingError
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.shard import VocabShard
from vocab_parallel.tie_loading import Tie, mark, tie_of

Vocabulary = str | Sequence[Any] | Mapping[Any, int]


def tie_weights(
    embedding: VocabParallelEmbedding,
    lm_head: VocabParallelLMHead,
    *also: VocabParallelEmbedding,
    vocabularies: Sequence[Vocabulary] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Makes `embedding.weight` the head's weight too, and that of `also`. Before the optimizer is built.

    Sets `zero_out_wgrad` on the Parameter. Where Megatron's data-parallel wrapper gives it a float32 `main_grad`, the
    head's loss adds to that by itself; the lookup's gradient comes in `.grad`, which the wrapper adds only where it
    finds this mark.

    A later `load_state_dict` (also with `assign=True`, also with one of the two keys) keeps them tied, and refuses a
    checkpoint whose tensors differ.

    Widths of hidden states and table that differ: give the head a `projection`.

    Args:
        also: More embeddings over the table, as in translation models: source and target. A tie gives row v one
            meaning, so each use must mean the same token by v. Sizes that agree prove nothing.
        vocabularies: The tokens of each use, in order of their ids: of `embedding`, of `lm_head`, of each of `also`.
            Each an ordered list of tokens, a mapping from token to id, or a hash of the ordered tokens as a string (all
            hashes, or none). Required with `also`.
        optimizer: An optimizer that exists already, to be checked: it must not hold a weight that the tie replaces.

    Raises:
        TyingError: They are over different layouts or groups, or differ in shape, dtype or device; their vocabularies
            differ, or are not given; or the optimizer holds a Parameter that the tie would orphan. Nothing is changed.
    """
    others: dict[str, VocabParallelEmbedding | VocabParallelLMHead]
    others = {"lm_head.weight": lm_head, **{f"also[{at}].weight": module for at, module in enumerate(also)}}
    for name, module in others.items():
        _require_same_rows(embedding, name, module)
    if vocabularies is not None or also:
        _require_same_tokens(["embedding.weight", *others], vocabularies, embedding.shard.vocab_size)
    source = embedding.weight
    for name, module in others.items():
        if optimizer is not None and module.weight is not source and _count(optimizer, module.weight):
            raise TyingError(
                f"the optimizer holds {name} as a Parameter of its own, apart from embedding.weight: it was built "
                "before the tie and would go on updating an orphan. Call tie_weights first, then build the optimizer."
            )
    mark(source)
    tie = tie_of(embedding) or Tie(embedding)
    for name, module in others.items():
        module.weight = source
        tie.join(module, name)


def verify_tied(model: nn.Module, optimizer: Any = None, *, required: bool = True) -> list[tuple[str, str]]:
    """Proves that every tie in `model` still holds, and that what is not tied is apart.

    Call it after construction, after the optimizer, after each load. Of each tie: one Parameter object, one key among
    the named parameters, one ZeRO-3 id, no mark that leaves it out of the norm. Of the untied: no common storage.

    Args:
        optimizer: Anything with `param_groups`. It must hold each tied Parameter once, none that the model lacks, and
            state of these alone and of the vocabulary that a migration has left. Master copies: see the integrations.
        required: Whether a model without a tie is an error.

    Returns:
        The tied pairs by their qualified names (weight of the embedding, weight of the head or further embedding).

    Raises:
        TyingError: Naming both parameters; or no tie was ever made. On this rank: what it looks at is the same on all.
    """
    names = {id(module): f"{name}.weight" if name else "weight" for name, module in model.named_modules()}
    ties = {id(tie): tie for module in model.modules() if (tie := tie_of(module)) is not None}
    tied = [
        ((names.get(id(tie.embedding), tie.names[0]), names[id(module)]), tie.embedding, module)
        for tie in ties.values()
        for module in tie.modules[1:]
        if id(module) in names
    ]
    for pair, embedding, module in tied:
        _verify_one(pair, embedding.weight, module.weight)
    _verify_apart(model)
    if not tied and required:
        raise TyingError(f"no tied head in {type(model).__name__}: call tie_weights(embedding, lm_head) first.")
    for pair, embedding, _ in tied:
        assert isinstance(embedding.weight, nn.Parameter)
        _verify_counted_once(model, embedding.weight, pair)
        if optimizer is not None:
            _verify_optimizer(model, optimizer, embedding.weight, pair)
    if optimizer is not None:
        from vocab_parallel.vocabulary.ownership import verify_ownership  # whose package imports this module

        verify_ownership(model, optimizer)
    return [pair for pair, _, _ in tied]


def vocab_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, VocabShard]]:
    """The parameters sharded over the vocabulary, with their shard, each once (a tied one under its first name)."""
    shards: dict[int, VocabShard] = {}
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding | VocabParallelLMHead):
            shards.update((id(parameter), module.shard) for parameter in module.parameters(recurse=False))
    return {name: (p, shards[id(p)]) for name, p in model.named_parameters() if id(p) in shards}


def _require_same_rows(
    embedding: VocabParallelEmbedding, name: str, other: VocabParallelEmbedding | VocabParallelLMHead
) -> None:
    source, own = embedding.weight, other.weight
    if embedding.shard.layout != other.shard.layout or embedding.shard.group != other.shard.group:
        both = f"{embedding.shard.layout} and {name} over {other.shard.layout}"
        groups = " in another process group" if embedding.shard.layout == other.shard.layout else ""
        words = "a tie needs the same ids on the same ranks. Build both from one VocabShard."
        raise TyingError(f"cannot tie embedding.weight over {both}{groups}: {words}")
    if source.shape != own.shape or source.dtype != own.dtype or source.device != own.device:
        wider = source.dim() == own.dim() == 2 and source.shape[1] != own.shape[1] and name == "lm_head.weight"
        raise TyingError(
            f"cannot tie embedding.weight {_words(source)} and {name} {_words(own)}: they must agree in shape, dtype "
            "and device."
            + (
                " For hidden states of another width than the table's, build the head in the table's width with "
                "projection=nn.Linear(hidden width, table width, bias=False)."
                if wider
                else ""
            )
        )


def _require_same_tokens(names: list[str], vocabularies: Sequence[Vocabulary] | None, vocab_size: int) -> None:
    """Raises unless every use means the same token by the same id."""
    if vocabularies is None or len(vocabularies) != len(names):
        raise TyingError(
            f"one table for {', '.join(names)} needs to know that its rows mean the same tokens everywhere: pass "
            f"vocabularies with {len(names)} entries, in this order, got "
            f"{'none' if vocabularies is None else len(vocabularies)}. Equal sizes do not prove it."
        )
    if len({isinstance(vocabulary, str) for vocabulary in vocabularies}) > 1:
        raise TyingError(
            f"the vocabularies of {', '.join(names)} must all be hashes, or all lists or mappings of their tokens: a "
            "hash cannot be compared with a list."
        )
    tables = [_ordered(name, vocabulary, vocab_size) for name, vocabulary in zip(names, vocabularies, strict=True)]
    for name, table in zip(names[1:], tables[1:], strict=True):
        if table == tables[0]:
            continue
        if isinstance(table, str):
            what = f"hash {tables[0]!r} and hash {table!r}"
        else:
            at = next(at for at, (mine, other) in enumerate(zip(tables[0], table, strict=True)) if mine != other)
            what = f"id {at} is {tables[0][at]!r} in the first and {table[at]!r} in the second"
        raise TyingError(
            f"cannot tie {names[0]} and {name}: their vocabularies differ: {what}. A row would have two meanings. Keep "
            "them apart, or give both one ordered vocabulary."
        )


def _ordered(name: str, vocabulary: Vocabulary, vocab_size: int) -> str | list[Any]:
    """A hash as it is, else the tokens in order of their ids."""
    if isinstance(vocabulary, str):
        return vocabulary
    if isinstance(vocabulary, Mapping):
        by_id = {index: token for token, index in vocabulary.items()}
        if sorted(by_id) != list(range(vocab_size)):
            raise TyingError(
                f"the vocabulary of {name} must map its tokens to the ids 0 to {vocab_size - 1}, one each, got "
                f"{len(vocabulary)} tokens with {len(by_id)} ids up to {max(by_id, default=-1)}. It must be that of "
                "embedding.weight and lm_head.weight."
            )
        return [by_id[index] for index in range(vocab_size)]
    if len(vocabulary) != vocab_size:
        raise TyingError(
            f"the vocabulary of {name} has {len(vocabulary)} tokens, but the table that embedding.weight and "
            f"lm_head.weight share has {vocab_size}."
        )
    return list(vocabulary)


def _verify_one(pair: tuple[str, str], first: Any, second: Any) -> None:
    """Raises unless both uses see one Parameter object."""
    if first is second:
        return
    ids = [getattr(weight, "ds_id", None) for weight in (first, second)]
    hints = " though they share storage: optimizers see two" if _overlap(first, second) else ""
    if ids[0] != ids[1]:
        hints += f" (ZeRO-3 partitions them as {ids[0]} and {ids[1]})"
    raise TyingError(
        f"{pair[0]} and {pair[1]} are no longer one Parameter{hints}. Something replaced one of them (to_empty, "
        "assignment of new Parameters, a copy). Call tie_weights again before the optimizer is built."
    )


def _verify_apart(model: nn.Module) -> None:
    """Raises if two Parameters over the vocabulary that are not tied share memory: a step of one would move both."""
    extents = [(name, _extent(parameter)) for name, (parameter, _) in vocab_parameters(model).items()]
    for (one, mine), (other, its) in combinations(extents, 2):
        if mine.start < its.stop and its.start < mine.stop:
            raise TyingError(
                f"{one} and {other} are two Parameters that share storage: a step of one moves both, and optimizers "
                "keep two sets of moments. To tie them call tie_weights; to keep them apart give each its own copy "
                "(likely one tensor of a checkpoint was assigned to both)."
            )


def _verify_counted_once(model: nn.Module, weight: nn.Parameter, pair: tuple[str, str]) -> None:
    """Raises unless the tied Parameter has one key, one ZeRO-3 id, and counts in the gradient norm."""
    named = list(model.named_parameters())
    count = sum(parameter is weight for _, parameter in named)
    if count != 1:
        raise TyingError(
            f"the tied Parameter {pair[0]} = {pair[1]} is {count} times among the model's named parameters, expected "
            "once. Likely a wrapper or a parametrization hides it: optimizers and checkpoints would not see it."
        )
    own = getattr(weight, "ds_id", None)
    for name, parameter in named:
        if own is not None and parameter is not weight and getattr(parameter, "ds_id", None) == own:
            raise TyingError(
                f"{name} has the ZeRO-3 id {own} of the tied Parameter {pair[0]} = {pair[1]}, but is another Parameter."
            )
    if getattr(weight, "shared", False):
        raise TyingError(
            f"the tied Parameter {pair[0]} = {pair[1]} is marked `shared`, which leaves it out of the gradient norm: "
            "that mark is for the last pipeline stage's copy of a weight whose first copy is elsewhere. Remove it."
        )


def _verify_optimizer(model: nn.Module, optimizer: Any, weight: nn.Parameter, pair: tuple[str, str]) -> None:
    count = _count(optimizer, weight)
    if count != 1:
        raise TyingError(
            f"the optimizer holds the tied Parameter {pair[0]} = {pair[1]} {count} times, expected once. "
            + (
                "Build the optimizer after tie_weights."
                if count == 0
                else "Give it model.parameters(), which lists a tied one once."
            )
        )
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    orphans = [_words(parameter) for parameter in held if id(parameter) not in known]
    if orphans:
        raise TyingError(
            f"the optimizer holds Parameters that the model no longer has ({', '.join(orphans)}), likely {pair[0]} "
            f"or {pair[1]} from before the tie. Build the optimizer after tie_weights."
        )
    owners, state = {id(parameter) for parameter in held}, getattr(optimizer, "state", None) or {}
    stale = [key for key in state if isinstance(key, Tensor) and id(key) not in owners]
    if stale:
        raise TyingError(
            f"the optimizer keeps state of {len(stale)} Parameters that are in none of its groups "
            f"({', '.join(map(_words, stale))}), likely {pair[0]} or {pair[1]} from before a change of its groups. "
            "Build the optimizer after tie_weights and load its state."
        )


def _count(optimizer: Any, parameter: nn.Parameter) -> int:
    return sum(p is parameter for group in optimizer.param_groups for p in group["params"])


def _overlap(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    mine, its = _extent(one), _extent(other)
    return mine.start < its.stop and its.start < mine.stop


def _extent(tensor: Any) -> range:
    """The addresses that a tensor spans, of a DTensor this rank's part; empty where it has no memory.

    Not its whole storage: optimizers and data-parallel wrappers lay parameters out in one buffer.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.is_meta or local.numel() == 0 or local.data_ptr() == 0:
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return range(local.data_ptr(), local.data_ptr() + (last + 1) * local.element_size())


def _words(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
