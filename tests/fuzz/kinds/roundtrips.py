"""What is written and read back, and what is computed from a layout: identities, maps, manifests, policies, layouts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tests.fuzz.case import Draw
from tests.fuzz.kinds.models import Model, Sharded
from tests.multirank.migration_cases import edited
from tests.unit.policies import chain_of
from vocab_parallel import Manifest, Streams, VocabIdentity, VocabLayout, VocabMap
from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.vocabulary.identity import ROLES
from vocab_parallel.vocabulary.manifest import compare
from vocab_parallel.vocabulary.mapping import compose

WHATS = ("identity", "map", "manifest", "policy", "layout", "vocabularies")


@dataclass(frozen=True, repr=False)
class RoundTrips(Model):
    kind: ClassVar[str] = "roundtrips"
    what: str = "identity"

    @classmethod
    def draw(cls, one: Draw) -> RoundTrips:
        return cls(**cls.drawn(one), what=one(*WHATS), dtype=one(torch.float32, torch.bfloat16))

    def identity(self, seed: int) -> VocabIdentity:
        """Tokens of any bytes, every kind, some special."""
        one = Draw("identity", seed)
        tokens, kinds = [], []
        for at in range(self.vocab):
            kind = one("normal", "normal", "normal", "special", "byte", "unused")
            bytes_ = bytes(one.below(256) for _ in range(one.below(5))) or str(at).encode()
            tokens.append(bytes_[:1] if kind == "byte" else f"<{at}>".encode() if kind == "special" else bytes_)
            kinds.append(kind)
        special = {role: one.below(self.vocab) for role in one.subset(ROLES)}
        return VocabIdentity(tuple(tokens), tuple(kinds), special, tuple(one.subset(range(self.vocab))[:3]))

    def map(self) -> VocabMap:
        one = Draw("map", self.seed)
        dropped = one.below(min(self.vocab, 4))
        return edited(self.vocab, one.below(5), one.below(self.vocab - dropped + 1), dropped, self.seed)

    def run(self, place: Any) -> Any:
        """Everything a rank found, as text: the same on each."""
        shard = place.shard(self.vocab, self.multiple_of)
        path = f"{place.folder}.{place.rank}"
        try:
            return getattr(self, f"run_{self.what}")(shard, path)
        finally:
            if os.path.exists(path):
                os.remove(path)

    def run_identity(self, shard: Any, path: str) -> str:
        made = self.identity(self.seed)
        made.write(path)
        read = VocabIdentity.read(path)
        assert read == made and read.sha256 == made.sha256, "another identity was read"
        assert VocabIdentity.from_json(json.loads(json.dumps(made.to_json()))) == made
        assert made.resized(self.vocab + 3).size == self.vocab + 3
        return made.sha256

    def run_map(self, shard: Any, path: str) -> str:
        made = self.map()
        made.write(path)
        read = VocabMap.read(path)
        assert read == made, "another map was read"
        back = VocabMap(made.new_to_old, made.old_to_new)
        there = compose(made, back)
        kept = made.old_to_new >= 0
        ids = torch.arange(self.vocab)
        assert torch.equal(there.old_to_new, torch.where(kept, ids, -1)), "there and back is not the identity"
        return "\n".join(made.describe())

    def run_vocabularies(self, shard: Any, path: str) -> str:
        old, new = self.identity(self.seed), self.identity(self.seed + Draw("new", self.seed)(0, 1))
        made = VocabMap.from_vocabs(old, new, allow_drop=True)
        for before, after in zip(*(side.tolist() for side in made.pairs()), strict=True):
            same = (old.kinds[before], old.tokens[before]) == (new.kinds[after], new.tokens[after])
            assert same or "special" in (old.kinds[before], new.kinds[after]), (before, after)
        if old == new:
            assert (
                all(made.old_to_new[at] == at or old.kinds[at] == "unused" for at in range(self.vocab))
                or old.duplicates()
            )
        return str(made.old_to_new.tolist())

    def run_manifest(self, shard: Any, path: str) -> str:
        loss = {name: value for name, value in self.options.items() if value is not None}
        made = Manifest.of(Sharded(self, shard), identity=self.identity(self.seed), loss=loss, step=self.seed % 100)
        os.makedirs(f"{path}.folder", exist_ok=True)
        written = made.write(f"{path}.folder")
        read = Manifest.read(written)
        os.remove(written)
        os.rmdir(f"{path}.folder")
        assert read == made and not list(compare(read, made)), "another manifest was read"
        assert Manifest.from_json(json.loads(made.to_text())) == made
        return made.to_text()

    def run_policy(self, shard: Any, path: str) -> str:
        vocab, rows = max(self.vocab, 5), 3
        made = chain_of(self.seed, rows, 7, vocab)
        assert Policy.from_dict(json.loads(made.to_json())).to_json() == made.to_json()
        state = made.start(rows, Streams.of([self.seed] * rows))
        saved = json.loads(json.dumps(state.state_dict()))
        assert PolicyState.from_state_dict(saved).state_dict() == state.state_dict()
        return made.to_json()

    def run_layout(self, shard: Any, path: str) -> str:
        layout = VocabLayout(self.vocab, self.tp, multiple_of=self.multiple_of)
        assert VocabLayout.from_padded(self.vocab, layout.padded_size, self.tp) == layout
        ranges = [layout.range(rank) for rank in range(self.tp)]
        assert [token for ids in ranges for token in ids] == list(range(self.vocab)), "an id has no owner, or two"
        assert all(token in ranges[layout.owner(token)] for token in range(self.vocab))
        assert layout.shard_size % self.multiple_of == 0 and layout.padded_size == layout.shard_size * self.tp
        assert layout.padded_size - self.vocab < self.tp * self.multiple_of, "more padding than needed"
        return str(layout)

    def check(self, results: list[Any]) -> None:
        assert len(set(results)) == 1, f"the ranks disagree: {results}"
