"""The class that a converted model has: its own, with a fused loss, whole checkpoints, and no resizing."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.errors import ConfigError
from vocab_parallel.integrations.transformers.conversion import Conversion
from vocab_parallel.integrations.transformers.saving import save_pretrained


def converted_class(plain: Any) -> type[Any]:
    """A subclass of the model's class, under its name."""
    parameters = list(inspect.signature(plain.forward).parameters.values())[1:]
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]

    @functools.wraps(plain.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        rest, arguments = args[len(names) :], dict(zip(names, args, strict=False)) | kwargs
        return _forward(self, plain, rest, arguments)

    @functools.wraps(plain.save_pretrained)
    def save(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        save_pretrained(self, plain, save_directory, *args, **kwargs)

    @functools.wraps(plain.resize_token_embeddings)
    def resize(self: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if new_num_tokens is None:  # only asks for the embedding
            return self.get_input_embeddings()
        raise ConfigError(
            "the vocabulary of a converted model cannot be resized: unapply(model), resize, then apply with a shard "
            "of the new size."
        )

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        conversion: Conversion = self._vocab_parallel
        if conversion.data_parallel and conversion.shard.tp_size > 1:
            # Each rank's forward needs the others': none may stop before all have.
            kwargs.setdefault("synced_gpus", True)
        return plain.generate(self, *args, **kwargs)

    members: dict[str, Any] = {
        "forward": forward, "save_pretrained": save, "resize_token_embeddings": resize,
        "__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__,
    }  # fmt: skip
    if hasattr(plain, "generate"):
        members["generate"] = functools.wraps(plain.generate)(generate)
    return type(plain.__name__, (plain,), members)


def _forward(model: Any, plain: Any, rest: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
    """The model's own forward, whose head is stopped before it projects, and the loss of what went into the head."""
    conversion: Conversion = model._vocab_parallel
    conversion.check(model)
    labels = arguments.pop("labels", None)
    with_logits = arguments.pop("return_logits", conversion.logits_with_loss)
    if labels is None:
        return plain.forward(model, *rest, **arguments)
    if model.training and torch.is_grad_enabled() and not conversion.managed and conversion.shard.tp_size > 1:
        _refuse_bare_trainer()
    shifted, items = arguments.pop("shift_labels", None), arguments.pop("num_items_in_batch", None)
    ignore_index = arguments.pop("ignore_index", -100)
    as_dict = arguments.pop("return_dict", None)
    as_dict = model.config.return_dict if as_dict is None else as_dict
    if not model.config.return_dict:
        arguments["return_dict"] = True

    def answer(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = conversion.loss(hidden, labels, shifted, items, ignore_index, arguments.get("input_ids"))
        return loss, conversion.whole_scores(hidden) if with_logits else None

    with conversion.head.answering(answer) as answers:
        output = plain.forward(model, *rest, **arguments)
    if len(answers) != 1:
        raise ConfigError(
            f"{type(model).__name__} called its head {len(answers)} times in one forward, expected once: the fused "
            "loss does not know what it stands for."
        )
    loss, logits = answers[0]
    auxiliary = output.get("aux_loss")
    if auxiliary is not None:  # of a mixture of experts, where the config asks for it
        loss = loss + model.config.get_text_config().router_aux_loss_coef * auxiliary
    fields = dict(output) | {"loss": loss}
    fields.pop("logits", None)
    if logits is not None:
        fields["logits"] = logits
    result = type(output)(**fields)
    return result if as_dict else result.to_tuple()


def _refuse_bare_trainer() -> None:
    """Raises under a `Trainer` that would clip each rank's gradients by a norm of its own, and save one shard."""
    module = sys.modules.get("transformers.trainer")
    frame = sys._getframe(1) if module is not None else None
    while frame is not None and module is not None:
        if isinstance(frame.f_locals.get("self"), module.Trainer):
            raise ConfigError(
                "a Trainer runs this converted model, but does not know of its shards: its gradient clipping, loss "
                "scale, data and checkpoints would be wrong. Call "
                "vocab_parallel.integrations.transformers.attach(trainer) before trainer.train()."
            )
        frame = frame.f_back
