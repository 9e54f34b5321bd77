"""A tuned lens: one affine residual a layer, learned so that the head reads the layer as it reads the last one.

Layer l's rows become `h + A_l h + b_l`, with `A_l = b_l = 0` at first: the plain logit lens. Training minimises
`KL(softmax(head(norm(h_last))) || softmax(head(norm(h + A_l h + b_l))))` by `linear_distillation`, which holds no
`[T, V]` tensor; norm and head are used detached, so that only the translator learns.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel.archives import require_archive
from vocab_parallel.errors import CheckpointLayoutError, LayoutMismatchError
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.loss import linear_distillation

_FORMAT = "vocab_parallel.translator/1"


class Translator(nn.Module):
    """Affine residual maps of L layers, replicated over the ranks.

    Args:
        layers: Their names, in the order of `hidden_by_layer`.
        hidden: D.
        norm_name: The final norm that it is learned for; saved with it, and `logit_lens` reads it through no other.

    Attributes:
        weight: `[L, D, D]`, A.
        bias: `[L, D]`, b.

    Source:
        Belrose et al. 2023 (arXiv:2303.08112), section 3.
    """

    def __init__(self, layers: Iterable[str], hidden: int, *, norm_name: str, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.layers, self.norm_name = tuple(layers), norm_name
        self.weight = nn.Parameter(torch.zeros(len(self.layers), hidden, hidden, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(len(self.layers), hidden, dtype=dtype))

    def forward(
        self,
        rows: Tensor,  # [..., D] of one layer
        layer: int,
    ) -> Tensor:
        """The rows in the last layer's basis, in their own dtype."""
        own = rows.to(self.weight.dtype)
        return (own + own @ self.weight[layer].T + self.bias[layer]).to(rows.dtype)

    def divergence(
        self,
        hidden_by_layer: Tensor,  # [L, T, D], the same on every rank
        last: Tensor,  # [T, D], the rows that the model's own norm and head read
        norm: nn.Module,
        head: VocabParallelLMHead,
        **options: Any,
    ) -> Tensor:
        """`KL(last || layer)` of each layer, `[L]`, the mean over rows in nats; differentiable in the translator only.

        Args:
            norm, head: The model's; their parameters get no gradient.
            options: Of `linear_distillation`, such as `target` with `ignore_index` for rows to leave out.

        Collectives:
            For each layer those of `linear_distillation`.

        Raises:
            As `linear_distillation`; and LayoutMismatchError where the layers are not this translator's.
        """
        check_hidden(hidden_by_layer)
        self.check_layers(len(hidden_by_layer))
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        with torch.no_grad():
            teacher = head.project(norm(last))

        def divergence(rows: Tensor, layer: int) -> Tensor:
            read = _detached(norm, self(rows, layer))
            read = read if head.projection is None else _detached(head.projection, read)
            return linear_distillation(
                read, weight, teacher, weight, shard=head.shard, linear_bias=bias, teacher_bias=bias, **options
            )

        return torch.stack([divergence(rows.detach(), layer) for layer, rows in enumerate(hidden_by_layer)])

    def check_layers(self, count: int) -> None:
        """Raises unless there are as many layers as names."""
        if count != len(self.layers):
            raise LayoutMismatchError(
                f"hidden_by_layer has {count} layers, the translator {len(self.layers)}: {', '.join(self.layers)}"
            )

    def check_norm_name(self, norm_name: str) -> None:
        """Raises unless it is the norm that the maps were learned for."""
        if norm_name != self.norm_name:
            raise ValueError(
                f"the translator is learned for the norm {self.norm_name!r}, and is asked to read through {norm_name!r}"
            )

    def save(self, path: str | Path) -> None:
        """Writes it to one file; call it on one rank."""
        about = {"format": _FORMAT, "layers": list(self.layers), "norm_name": self.norm_name}
        torch.save({**about, "state": self.state_dict()}, path)

    @classmethod
    def load(cls, path: str | Path) -> Translator:
        """The translator of a file that `save` wrote.

        Raises:
            CheckpointLayoutError: The file is another one, or damaged.
        """
        try:
            require_archive(Path(path))
            found = torch.load(path, map_location="cpu", weights_only=True)
            if found["format"] != _FORMAT:
                raise KeyError("format")
            weight = found["state"]["weight"]
            if tuple(weight.shape) != (len(found["layers"]), *2 * (weight.shape[-1],)) or not weight.is_contiguous():
                raise ValueError(f"a weight {list(weight.shape)} for {len(found['layers'])} layers")
            made = cls(found["layers"], weight.shape[-1], norm_name=found["norm_name"], dtype=weight.dtype)
            made.load_state_dict(found["state"])
        except Exception as error:  # a broken archive raises nearly anything
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointLayoutError(f"{path} is no {_FORMAT} file ({what})") from error
        return made

    def extra_repr(self) -> str:
        return f"{len(self.layers)} layers, {self.weight.shape[-1]}, norm_name={self.norm_name!r}"


def fit_translator(
    translator: Translator,
    batches: Iterable[tuple[Tensor, Tensor]],  # ([L, T, D], [T, D]) each
    norm: nn.Module,
    head: VocabParallelLMHead,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> list[list[float]]:
    """Trains the translator, one step of the optimizer a batch.

    Args:
        batches: Pairs of `hidden_by_layer` and `last`, as in `Translator.divergence`; the same on every rank.
        optimizer: Of the translator's parameters. None: Adam at a rate of 1e-3.
        options: As in `Translator.divergence`.

    Returns:
        Each layer's divergence before each step, `[steps][L]` nats; the same on every rank, as is the translator.
    """
    if optimizer is None:
        optimizer = torch.optim.Adam(translator.parameters(), lr=1e-3)
    history = []
    for hidden_by_layer, last in batches:
        divergence = translator.divergence(hidden_by_layer, last, norm, head, **options)
        optimizer.zero_grad()
        torch.autograd.backward(divergence.sum())
        optimizer.step()
        history.append(divergence.tolist())
    return history


def check_hidden(hidden_by_layer: object) -> None:
    """Raises unless these are floating `[L, ..., D]` rows of at least one layer."""
    good = isinstance(hidden_by_layer, Tensor) and hidden_by_layer.is_floating_point() and hidden_by_layer.dim() >= 3
    if not good or not len(hidden_by_layer):  # type: ignore[arg-type]
        got = list(hidden_by_layer.shape) if isinstance(hidden_by_layer, Tensor) else type(hidden_by_layer).__name__
        raise LayoutMismatchError(f"hidden_by_layer must be floating rows [L, T, D] of at least one layer, got {got}")


def check_norm(norm: object, norm_name: object) -> None:
    """Raises unless the caller has said which final norm it is."""
    if not isinstance(norm, nn.Module) or not isinstance(norm_name, str) or not norm_name:
        raise ValueError(
            f"a lens needs the model's final norm and its name, got {type(norm).__name__} named {norm_name!r}: which "
            "norm it is decides what is read. For rows that are normed already pass nn.Identity() and a name such as "
            "'none, applied by the model'."
        )


def _detached(module: nn.Module, rows: Tensor) -> Tensor:
    """The module's output; its parameters get no gradient."""
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    result: Tensor = torch.func.functional_call(module, parameters, (rows,))
    return result
