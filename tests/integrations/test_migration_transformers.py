"""A converted Transformers model moves to another vocabulary in the middle of a run, with all that repeats its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.transformers_models import batch, build, make_optimizer, make_shard
from tests.multirank.shared_world import Batch
from vocab_parallel.integrations import transformers as vp
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration import migrate_model_
from vocab_parallel.vocabulary.migration.model_conformance import conformance_report, record_model

OLD, NEW = 29, 34
MAP = VocabMap.from_pairs(OLD, NEW, {old: (old * 3 + 2) % OLD for old in range(OLD)}, sources={30: (4, 5)})


def _step(model: Any, optimizer: Any, ids: Any, labels: Any) -> float:
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def _migrate(rank: int, family: str) -> dict[str, Any]:
    model = build(family, OLD, eos_token_id=7, pad_token_id=0)
    vp.apply(model, shard=make_shard(OLD, 4))
    optimizer = make_optimizer(model)
    ids, labels = batch(OLD, 1)
    losses = [_step(model, optimizer, ids, labels) for _ in range(3)]
    record = record_model(model, optimizer)
    with torch.no_grad():
        before = model(ids).logits
    migrate_model_(model, optimizer, MAP)
    new_ids, new_labels = MAP.old_to_new[ids], torch.where(labels < 0, labels, MAP.old_to_new[labels.clamp(min=0)])
    with torch.no_grad():
        after = model(new_ids).logits
    found = conformance_report(record, model, optimizer, MAP)
    losses += [_step(model, optimizer, new_ids, new_labels) for _ in range(2)]
    tied = vp.verify(model, optimizer)
    model.eval()
    written = model.generate(new_ids[:, :3], max_new_tokens=4, do_sample=False, attention_mask=torch.ones(3, 3))
    vp.unapply(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return {
        "logits": torch.equal(after[..., MAP.old_to_new], before), "columns": after.shape[-1], "losses": losses,
        "passed": found.passed, "tied": bool(tied), "written": written,
        "ids": (model.config.vocab_size, model.config.eos_token_id, model.config.pad_token_id,
                model.generation_config.eos_token_id, embedding.padding_idx),
        "sizes": (embedding.num_embeddings, len(embedding.weight), head.out_features, len(head.weight)),
    }  # fmt: skip


RUN = Batch(_migrate, [("llama",), ("llama untied",), ("gpt2",)])


@pytest.mark.parametrize("family", ["llama", "llama untied", "gpt2"])
def test_a_converted_model_goes_on_with_its_new_vocabulary(family: str):
    ranks = RUN(3, family)
    one = ranks[0]
    assert all(rank["losses"] == one["losses"] and torch.equal(rank["written"], one["written"]) for rank in ranks)
    assert one["logits"] and one["columns"] == NEW and one["passed"] and one["tied"] == (family != "llama untied")
    assert abs(one["losses"][3] - one["losses"][2]) < 1.0 and one["losses"][4] < one["losses"][3]
    end, pad = int(MAP.old_to_new[7]), int(MAP.old_to_new[0])
    padding = None if family == "gpt2" else pad  # GPT-2 gives its embedding none
    assert one["ids"] == (NEW, end, pad, end, padding)
    assert one["sizes"] == (NEW, NEW, NEW, NEW)
