"""Each field of a manifest: what it says, who must agree on it, which failure that prevents, and what helps."""

from __future__ import annotations

from typing import NamedTuple

LOAD, COMPARE = "load", "compare"


class Rule(NamedTuple):
    """One field.

    Attributes:
        field: Dotted.
        gates: Before what the two sides must agree: "load", "compare", both or none.
        why: The failure that this prevents.
        fix: What to do, with `{where}` for the checkpoint; empty: nothing but to use the other artifact.
        informational: Of a field without gates: to be read only, not a knob.
        none_is_unknown: None says that nobody recorded it, not that it is absent.
    """

    field: str
    gates: tuple[str, ...]
    why: str
    fix: str = ""
    informational: bool = False
    none_is_unknown: bool = False


_BOTH, _LOAD, _COMPARE = (LOAD, COMPARE), (LOAD,), (COMPARE,)

_MIGRATE = (
    "Move its rows to the other vocabulary: python -m vocab_parallel migrate {where} <target> --old-vocab <its "
    "tokenizer> --new-vocab <the tokenizer in use>; or use its tokenizer."
)
_WIDTH = "No command changes a width: build the model with the saved one, or train anew."
_TOKENIZER = "Use the tokenizer files that it was saved with."
_TIE = (
    'A tied checkpoint loads into an untied model by load_checkpoint(..., tie="untie"), two equal tables into a tied '
    'one by tie="require_equal".'
)
_KEYS = "Build the model with the saved names; python -m vocab_parallel manifest show {where} lists them."
_DTYPE = "Load it as this dtype by load_checkpoint(..., cast=True), or into a model of the saved one."
_MODEL = "Build the model as it was saved; python -m vocab_parallel manifest show {where} tells how."
_OLD = "Load it with the version that wrote it, and save it anew."

_DRAW = "same logits and seed draw different tokens, which looks like a fault of the model"


def _unknown(field: str, gates: tuple[str, ...], why: str, fix: str = "") -> Rule:
    return Rule(field, gates, why, fix, none_is_unknown=True)


def _read_only(field: str, why: str) -> Rule:
    return Rule(field, (), why, informational=True)


RULES = (
    Rule("version", _BOTH, "a reader takes one meaning of a field for another", _OLD),
    Rule("head.width", _BOTH, "rows of another width cannot score these hidden states", _WIDTH),
    Rule("head.output_width", _BOTH, "some ids have no row, or rows without an id take probability", _MIGRATE),
    Rule("head.embedding_key", _LOAD, "the loader finds no tensor under the other name", _KEYS),
    Rule("head.head_key", _LOAD, "the loader finds no tensor under the other name", _KEYS),
    Rule("head.bias_key", _LOAD, "the loader finds no tensor under the other name", _KEYS),
    Rule("head.storage", _BOTH, "a transposed table scores with columns for rows", _MODEL),
    Rule("head.bias", _BOTH, "scores without the bias of each id, or with a bias that was never trained", _MODEL),
    Rule("head.parameter_dtype", _BOTH, "rounded weights give other scores, silently", _DTYPE),
    Rule("head.accumulation_dtype", _COMPARE, "sums of another precision differ by more than the models do"),
    Rule("head.projection", _BOTH, "hidden states reach the table by another map", _MODEL),
    Rule("head.softcap", _BOTH, "logits of another range: other probabilities from the same rows", _MODEL),
    Rule("head.scale", _BOTH, "logits of another temperature from the same rows", _MODEL),
    Rule("vocabulary.size", _BOTH, "ids of one side have no row on the other", _MIGRATE),
    _unknown("vocabulary.ordered_table_sha256", _BOTH, "correct numbers attached to wrong symbols", _MIGRATE),
    _unknown("vocabulary.special_ids", _BOTH, "texts begin, end or pad with a token that means another", _TOKENIZER),
    _unknown("vocabulary.added", _BOTH, "added tokens in another order have each other's rows", _TOKENIZER),
    _read_only("vocabulary.source", "the same table may come from several formats"),
    Rule("tying.tied", _BOTH, "one weight becomes two that drift apart, or two are forced into one", _TIE),
    Rule("tying.embedding_key", _LOAD, "the one stored weight is looked for under another name", _TIE),
    Rule("tying.aliases", _LOAD, "a use of the shared weight is left with another tensor", _TIE),
    Rule("tying.restoration", _LOAD, "equal values in two Parameters pass for a tie until the first step", _TIE),
    Rule("loss.score_type", _COMPARE, "log-probabilities are normalised a second time, or logits never"),
    Rule("loss.target_type", _COMPARE, "the loss against a distribution has another floor than that against ids"),
    Rule("loss.ignore_index", _COMPARE, "padding counts as a token, or a token as padding"),
    Rule("loss.label_smoothing", _COMPARE, "smoothing raises the loss without a worse model"),
    Rule("loss.smoothing_over", _COMPARE, 'mass on "all" classes and on the "others" differs by the target\'s share'),
    Rule("loss.z_loss", _COMPARE, "the number holds a penalty beside the cross entropy"),
    Rule("loss.softcap", _COMPARE, "the loss of bounded scores is not that of the raw ones"),
    Rule("loss.temperature", _COMPARE, "the loss of scaled scores is not that of the raw ones"),
    Rule("loss.reduction", _COMPARE, "a sum, or a mean of means, is read as a mean over tokens"),
    Rule("loss.vocabulary_sharded", (), "sharding changes memory and traffic, not the number"),
    Rule("loss.tp_invariant", (), "without it the last bits depend on the TP size"),
    Rule("loss.unit", _COMPARE, "nats and bits differ by a factor of 0.69"),
    Rule("policy.transforms", _COMPARE, "transforms do not commute: the same logits give other tokens"),
    Rule("policy.selector", _COMPARE, "a greedy choice is compared with a draw"),
    Rule("policy.fallback", _COMPARE, "rows without a legal token end differently"),
    Rule("policy.stop_ids", _COMPARE, "texts end at different tokens, so lengths and scores differ"),
    Rule("policy.logprobs", _COMPARE, "log-probabilities of the model are read as those of what was drawn from"),
    Rule("policy.special_ids", (), "names in a trace only"),
    Rule("policy.vocab_size", (), "checked against vocabulary.size on each side", informational=True),
    _read_only("policy.name", "a name only"),
    Rule("policy.version", _COMPARE, "a transform's parameters may mean something else"),
    Rule("randomness.algorithm", _COMPARE, _DRAW),
    Rule("randomness.seed", (), "another sample of the same distribution"),
    Rule("randomness.stream_owner", _COMPARE, "a request's tokens depend on what it was batched with"),
    Rule("randomness.draw_contract", _COMPARE, _DRAW),
    Rule("checkpoint.padded_size", (), "padding rows are storage only; a load reshards"),
    Rule("checkpoint.tp_size", (), "a load reshards; keys are global rows"),
    Rule("checkpoint.tensors", _LOAD, "a tensor stays as it was initialised, or gets another's values", _MODEL),
    _read_only("checkpoint.step", "how far it was trained"),
    Rule("checkpoint.format", _LOAD, "a loader takes one file layout for another", _OLD),
    Rule("checkpoint.shard_ranges", (), "follows from tp_size and padded_size"),
    _read_only("runtime.versions", "the first thing to look at when bits differ"),
    _read_only("runtime.host", "the stack that it ran in"),
    _read_only("runtime.host_version", "the stack that it ran in"),
    _read_only("runtime.device", "devices round differently"),
    _read_only("runtime.kernels", "kernels round differently"),
    _read_only("notes", "free remarks"),
)
