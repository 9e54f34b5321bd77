"""Failures 25 to 32: rows and the tokens they stand for, and one weight with two uses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.failures.lab import failure, refusal, the_same_on_all, whole_shard
from tests.multirank.loss_case import shard_of
from tests.multirank.shared_world import Batch
from vocab_parallel import (
    CheckpointLayoutError,
    LayoutError,
    LayoutMismatchError,
    Manifest,
    TyingError,
    VocabIdentity,
    VocabMap,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    greedy,
    migrate_model_,
    tie_weights,
    verify_tied,
)
from vocab_parallel.checkpoint import load_checkpoint, save_checkpoint

VOCAB, WIDTH = 9, 6
TOKENS = ["<pad>", "<s>", "</s>", "a", "b", "c", "d", "e", "f"]
SWAPPED = ["<pad>", "<s>", "</s>", "b", "a", "c", "d", "e", "f"]
HIDDEN = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([0, 8, 3, 3])


class Model(nn.Module):
    """An embedding and a head; `head_shard` where the head is over another vocabulary."""

    def __init__(self, shard, *, tied=True, head_shard=None):
        super().__init__()
        self.embedding = VocabParallelEmbedding(WIDTH, shard=shard)
        self.lm_head = VocabParallelLMHead(WIDTH, shard=head_shard or shard)
        if tied:
            tie_weights(self.embedding, self.lm_head)

    def step(self, optimizer):
        """One step on a batch that looks ids up and predicts them."""
        self.lm_head.loss(self.embedding(IDS) + HIDDEN, IDS).backward()
        optimizer.step()
        optimizer.zero_grad()


def copied(shard):
    """An untied model whose two tables hold the same values."""
    model = Model(shard, tied=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.embedding.weight)
    return model


def of_tokens(tokens):
    return VocabIdentity.of_tokens(tokens, special_ids={"pad": 0, "bos": 1, "eos": 2})


CALLS = {  # on four ranks of 4 rows: storage for ids up to 15, of which 9 are real
    "a new id looked up": lambda shard: Model(shard).embedding(torch.tensor([3, VOCAB])),
    "a new id as target": lambda shard: Model(shard).lm_head.loss(HIDDEN, torch.tensor([0, VOCAB, 3, 3])),
    "only the embedding grown": lambda shard: Model(
        shard_of(VOCAB + 2, 4), tied=False, head_shard=shard
    ).lm_head.loss(HIDDEN, torch.tensor([0, VOCAB + 1, 3, 3])),
    "only the embedding grown, tied": lambda shard: Model(shard_of(VOCAB + 2, 4), head_shard=shard),
    "copies called tied": lambda shard: verify_tied(copied(shard)),
}  # fmt: skip


def _refused(rank, name):
    return refusal(CALLS[name], shard_of(VOCAB, 4))


REFUSED = Batch(_refused, [(name,) for name in CALLS])


def refused(name):
    return [the_same_on_all(REFUSED(tp, name)) for tp in (2, 4)]


@failure(
    25, "A tokenizer whose ids are in another order than the rows", "refused",
    "A vocabulary is its ordered table: a checkpoint carries its hash, and a load into a model of another order is an "
    "error on every rank, though every shape agrees; a map of the two moves the rows.",
)  # fmt: skip
def test_the_same_tokens_in_another_order_are_refused(tmp_path):
    ours, theirs = of_tokens(TOKENS), of_tokens(SWAPPED)
    assert ours.size == theirs.size and sorted(ours.tokens) == sorted(theirs.tokens)
    model = Model(whole_shard(VOCAB))
    model.embedding.reset_parameters(std=1.0)
    logits = HIDDEN @ model.embedding.weight.T.detach()
    chosen = greedy(logits, shard=whole_shard(VOCAB)).tolist()
    logits[0, 3] = 99.0
    said = greedy(logits, shard=whole_shard(VOCAB)).tolist()[0]
    assert (ours.named(said), theirs.named(said)) == ("'a'", "'b'") and len(chosen) == 4  # what would be written
    manifest = Manifest.of(model, identity=ours)
    path = save_checkpoint(tmp_path, model, None, 1, manifest=manifest, identity=ours)
    here = Manifest.of(model, identity=theirs)
    with pytest.raises(CheckpointLayoutError, match=r"vocabulary\.ordered_table_sha256"):
        load_checkpoint(path, model, manifest=here)
    with pytest.raises(CheckpointLayoutError, match="the same ids would mean other tokens"):
        load_checkpoint(path, model, vocabulary_sha256=theirs.sha256)
    assert load_checkpoint(path, model, manifest=manifest, vocabulary_sha256=ours.sha256)[0] == 1
    before = model.embedding.weight.detach().clone()
    migrate_model_(model, None, VocabMap.from_vocabs(ours, theirs))
    assert torch.equal(model.embedding.weight[[3, 4]], before[[4, 3]])


@failure(
    26, "New tokens without rows", "refused",
    "An id without a row is an error on every rank at its first lookup and as a target, also where padding would have "
    "room for it; a manifest of more tokens than rows cannot be made; `migrate_model_` gives new tokens rows.",
)  # fmt: skip
def test_an_id_without_a_row_is_refused():
    for kind, message in refused("a new id looked up"):
        assert kind == "TokenRangeError" and "9 at position 1" in message and "have storage" in message
    for kind, message in refused("a new id as target"):
        assert kind == "TargetRangeError" and "target 9 at row 1" in message
    model = Model(whole_shard(VOCAB, multiple_of=4))
    assert len(model.embedding.weight) == 12 and bool((model.embedding.weight[VOCAB:] == 0).all())  # read by accident
    with pytest.raises(CheckpointLayoutError, match="has 10 tokens, the model 9 rows"):
        Manifest.of(model, identity=of_tokens([*TOKENS, "g"]))
    old = model.embedding.weight.detach()[:VOCAB].clone()
    migrate_model_(model, None, VocabMap.append(VOCAB, 1))
    assert torch.equal(model.embedding.weight[:VOCAB], old) and bool((model.embedding.weight[VOCAB] != 0).any())
    assert model.embedding(torch.tensor([VOCAB])).shape == (1, WIDTH)
    assert model.lm_head.loss(HIDDEN[:1], torch.tensor([VOCAB])).isfinite()


@failure(
    27, "Only the input embedding resized", "refused",
    "A migration moves embedding, head, bias and optimizer together and refuses a model of two vocabularies; a tie, a "
    "target that the head has no row for, and the Transformers conversion of such a model are errors on every rank.",
)  # fmt: skip
def test_an_embedding_that_grew_alone_is_refused():
    for kind, message in refused("only the embedding grown"):
        assert kind == "TargetRangeError" and "target 10 at row 1 is outside [0, 9)" in message
    for kind, message in refused("only the embedding grown, tied"):
        assert kind == "TyingError" and "a tie needs the same ids" in message
    grown = Model(whole_shard(VOCAB + 2), tied=False, head_shard=whole_shard(VOCAB))
    assert grown.embedding(torch.tensor([VOCAB + 1])).shape == (1, WIDTH)  # the lookup alone says nothing
    with pytest.raises(LayoutError, match="different vocabularies"):
        migrate_model_(grown, None, VocabMap.append(VOCAB, 2))
    both = Model(whole_shard(VOCAB), tied=False)
    migrate_model_(both, None, VocabMap.append(VOCAB, 2))
    assert len(both.embedding.weight) == len(both.lm_head.weight) == VOCAB + 2

    from tests.integrations.transformers_models import build
    from vocab_parallel.integrations import transformers as vp

    model = build("llama untied", VOCAB)
    model.model.embed_tokens = nn.Embedding(VOCAB + 2, model.config.hidden_size)
    with pytest.raises(LayoutMismatchError, match="only one of the two was resized"):
        vp.apply(model, shard=whole_shard(VOCAB))


@failure(
    28, "Copied values called a tie", "refused",
    "A tie is one Parameter with two uses: `verify_tied` refuses two that are equal, on every rank, and after a step "
    "they are equal no more.",
)  # fmt: skip
def test_equal_values_are_no_tie():
    for kind, message in refused("copies called tied"):
        assert kind == "TyingError" and "no tied head" in message
    ends = {}
    for name, model in (("copied", copied(whole_shard(VOCAB))), ("tied", Model(whole_shard(VOCAB)))):
        assert torch.equal(model.embedding.weight, model.lm_head.weight)
        model.step(torch.optim.AdamW(model.parameters(), lr=0.1))
        ends[name] = model
    assert not torch.allclose(ends["copied"].embedding.weight, ends["copied"].lm_head.weight, atol=0.01)
    assert ends["tied"].embedding.weight is ends["tied"].lm_head.weight
    assert verify_tied(ends["tied"]) == [("embedding.weight", "lm_head.weight")]
    ends["tied"].lm_head.weight = nn.Parameter(ends["tied"].embedding.weight.detach().clone())
    with pytest.raises(TyingError, match=r"embedding\.weight and lm_head\.weight are no longer one Parameter"):
        verify_tied(ends["tied"])


@failure(
    29, "Source, target and output tied over different vocabularies", "refused",
    "A tie of more than two uses needs each one's ordered tokens, and the first id that means two tokens is an error "
    "that names them: sizes that agree prove nothing.",
)  # fmt: skip
def test_a_three_way_tie_needs_one_vocabulary():
    shard = whole_shard(VOCAB)
    target, source = VocabParallelEmbedding(WIDTH, shard=shard), VocabParallelEmbedding(WIDTH, shard=shard)
    head = VocabParallelLMHead(WIDTH, shard=shard)
    assert target.weight.shape == source.weight.shape == head.weight.shape  # all that a careless tie looks at
    with pytest.raises(TyingError, match="Equal sizes do not prove it"):
        tie_weights(target, head, source)
    with pytest.raises(TyingError, match="id 3 is 'a' in the first and 'b' in the second"):
        tie_weights(target, head, source, vocabularies=[TOKENS, TOKENS, SWAPPED])
    assert len({id(one.weight) for one in (target, source, head)}) == 3
    tie_weights(target, head, source, vocabularies=[TOKENS, TOKENS, TOKENS])
    assert target.weight is source.weight is head.weight


@failure(
    30, "The assumption that every Llama ties its embedding", "refused",
    "The conversion looks at the Parameters, not at the family: a tied model stays tied, an untied one keeps two, and "
    "a configuration that claims a tie which is not there is an error, as `verify_tied` of an untied model is.",
)  # fmt: skip
def test_a_tie_is_what_the_parameters_say():
    from tests.integrations.transformers_models import build
    from vocab_parallel.integrations import transformers as vp

    for family, tables in (("llama", 1), ("llama untied", 2)):
        model = build(family, VOCAB)
        assert len(vp.apply(model, shard=whole_shard(VOCAB))) == tables
        same = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert same == (tables == 1), family
        if tables == 2:
            with pytest.raises(TyingError, match="no tied head"):
                verify_tied(model)
    claimed = build("llama untied", VOCAB)
    claimed.config.tie_word_embeddings = True
    with pytest.raises(TyingError, match="tie_word_embeddings is set, but"):
        vp.apply(claimed, shard=whole_shard(VOCAB))


@failure(
    31, "An optimizer built before the tie", "refused",
    "`tie_weights(optimizer=...)` refuses one that holds a weight the tie would orphan, with nothing changed, and "
    "`verify_tied(model, optimizer)` one that already does.",
)  # fmt: skip
def test_an_optimizer_from_before_the_tie_is_refused():
    model = Model(whole_shard(VOCAB), tied=False)
    early = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(TyingError, match=r"holds lm_head\.weight as a Parameter of its own"):
        tie_weights(model.embedding, model.lm_head, optimizer=early)
    assert model.embedding.weight is not model.lm_head.weight
    orphan = model.lm_head.weight
    tie_weights(model.embedding, model.lm_head)
    model.step(early)
    assert any(held is orphan for group in early.param_groups for held in group["params"])  # moments for nothing
    with pytest.raises(TyingError, match="Parameters that the model no longer has"):
        verify_tied(model, early)
    late = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.step(late)
    assert len(late.state) == 1 and verify_tied(model, late)


@failure(
    32, "Tied rows read as neighbours by cosine", "shown",
    "The head's scores are dot products plus the bias, of rows of any length: greedy's choice is the largest of "
    "these, where the nearest row by angle would be another.",
)  # fmt: skip
def test_scores_are_dot_products_and_not_angles():
    shard = whole_shard(3)
    head = VocabParallelLMHead(2, shard=shard, bias=True)
    rows = torch.tensor([[1.0, 0.0], [4.0, 4.0], [0.0, 0.5]])
    head.load_state_dict({"weight": rows, "bias": torch.zeros(3)})
    hidden = torch.tensor([[1.0, 0.1]])
    angles = torch.nn.functional.cosine_similarity(hidden, rows)
    assert int(angles.argmax()) == 0
    assert torch.allclose(head.logits(hidden), hidden @ rows.T) and greedy(head.logits(hidden), shard=shard).item() == 1
    head.load_state_dict({"weight": rows, "bias": torch.tensor([0.0, -9.0, 3.0])})
    assert greedy(head.logits(hidden), shard=shard).item() == 2
