"""What the manifest reads from converted Transformers models."""

from __future__ import annotations

import pytest

from tests.integrations.transformers_models import HIDDEN, build
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.integrations import transformers as integration
from vocab_parallel.vocabulary.manifest import Manifest, compare

V = 19
# family: head's name, tied, softcap and scale of its logits
FAMILIES = {
    "llama": ("lm_head.weight", True, None, None),
    "llama untied": ("lm_head.weight", False, None, None),
    "gpt2": ("lm_head.weight", True, None, None),
    "gemma2": ("lm_head.weight", True, 2.0, None),
    "cohere": ("lm_head.weight", True, None, 0.25),
    "granite": ("lm_head.weight", True, None, 1 / 3),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_tie_and_the_logits_own_softcap_and_scale_are_read(family: str) -> None:
    name, tied, softcap, scale = FAMILIES[family]
    model = build(family, V)
    integration.apply(model, shard=VocabShard(VocabLayout(V, 1, multiple_of=8)))
    found = Manifest.of(model, host="transformers")
    assert (found.head.head_key, found.head.width, found.tying.tied) == (name, HIDDEN, tied)
    assert (found.head.softcap, found.head.scale) == (softcap, pytest.approx(scale) if scale else None)
    assert found.head.embedding_key is not None and found.checkpoint is not None
    assert found.checkpoint.tensors[f"model.{found.head.embedding_key}"].shape == (V, HIDDEN)
    assert (f"model.{name}" in found.checkpoint.tensors) == (not tied)
    assert found.tying.aliases == ({name: found.head.embedding_key} if tied else {})
    assert found.runtime.host_version is not None


def test_one_architecture_with_another_softcap_is_another_head() -> None:
    found = []
    for softcap in (2.0, 30.0):
        model = build("gemma2", V, final_logit_softcapping=softcap)
        integration.apply(model, shard=VocabShard(VocabLayout(V, 1)))
        found.append(Manifest.of(model))
    assert [(one.field, one.kind) for one in compare(*found)] == [("head.softcap", "must match")]
