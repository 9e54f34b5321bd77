"""Small self-tests of every operation: sharded on this job's ranks in float32, compared with the oracle in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.comparing import backward, difference, gradient, relative, scaled
from vocab_parallel.app.job import Job
from vocab_parallel.embedding import VocabParallelEmbedding, vocab_parallel_embedding
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.loss import cross_entropy, linear_cross_entropy, token_logprobs
from vocab_parallel.select import Streams, greedy, sample, top_k, top_p
from vocab_parallel.tying import tie_weights

VOCAB, WIDTH, TOKENS, CANDIDATES = 1009, 48, 37, 50  # an odd vocabulary: the last shard holds padding
LIMIT = 1e-5  # absolute for losses, relative to the largest entry for gradients
Test = tuple[str, Callable[[], float], float]


class SelfTests:
    """The same random problem on every rank, and one test for each operation and option."""

    def __init__(self, job: Job) -> None:
        self.shard = job.shard(VOCAB, 8)
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(job.device)

        self.table, self.bias, self.hidden = normal(VOCAB, WIDTH) * 0.2, normal(VOCAB), normal(TOKENS, WIDTH)
        self.ids = torch.randint(VOCAB, (TOKENS,), generator=generator).to(job.device)
        self.target = self.ids.roll(-1).clone()
        self.target[::7] = -100  # some rows ignored
        share, rank = -(-TOKENS // job.tp), self.shard.rank
        self.own = slice(share * rank, min(TOKENS, share * (rank + 1)))  # rows under sequence parallelism

    def all(self) -> list[Test]:
        """Name, test and limit of each; a test returns its largest error."""
        tests: list[Test] = [
            ("embedding", partial(self.embedding, False), LIMIT),
            ("embedding, sequence parallel", partial(self.embedding, True), LIMIT),
        ]
        for name, loss in (("cross_entropy", self.logits_loss), ("linear_cross_entropy", self.linear_loss)):
            for reduction in ("none", "sum", "mean"):
                tests.append((f"{name}, {reduction}", partial(loss, reduction=reduction), LIMIT))
            for over in ("all", "others"):
                options: dict[str, Any] = {"label_smoothing": 0.1, "smoothing_over": over}
                tests.append((f"{name}, smoothing over {over}", partial(loss, **options), LIMIT))
            tests.append((f"{name}, z-loss", partial(loss, z_loss=1e-3), LIMIT))
            tests.append((f"{name}, softcap and temperature", partial(loss, softcap=5.0, temperature=0.7), LIMIT))
        tests += [
            ("linear_cross_entropy, bias", partial(self.linear_loss, with_bias=True), LIMIT),
            ("linear_cross_entropy, sequence parallel", partial(self.linear_loss, sequence_parallel=True), LIMIT),
            ("token_logprobs", self.logprobs, LIMIT),
            ("greedy", self.greedy, 0.0),
            ("top_k", self.top_k, 0.0),
            ("top_p", self.top_p, 0.0),
            ("sample", self.sample, 0.0),
            ("tied embedding and head", self.tied, LIMIT),
        ]
        return tests

    def embedding(self, sequence_parallel: bool) -> float:
        """Values and the weight's gradient."""
        weight = self.shard.slice(self.table).requires_grad_()
        whole = self.table.double().requires_grad_()
        got = vocab_parallel_embedding(self.ids, weight, shard=self.shard, sequence_parallel=sequence_parallel)
        want = reference.embedding(self.ids, whole)
        backward(got.square())
        backward(want.square())
        return max(
            difference(got, want[self.own] if sequence_parallel else want),
            relative(weight.grad, self.shard.slice(gradient(whole))),
        )

    def logits_loss(self, **options: object) -> float:
        """`cross_entropy`: loss and the logits' gradient."""
        whole = reference.logits(self.hidden, self.table, self.bias).double().requires_grad_()
        local = self.shard.slice(whole.detach().float(), dim=-1).requires_grad_()
        got = cross_entropy(local, self.target, shard=self.shard, **options)  # type: ignore[arg-type]
        want = reference.cross_entropy(whole, self.target, **options)  # type: ignore[arg-type]
        backward(got)
        backward(want)
        return max(scaled(got, want), relative(local.grad, self.shard.slice(gradient(whole), dim=-1)))

    def linear_loss(
        self, *, with_bias: bool = False, sequence_parallel: bool = False, reduction: str = "mean", **options: object
    ) -> float:
        """`linear_cross_entropy`: loss and the gradients of hidden states, weight and bias, in several chunks."""
        whole = [t.double().requires_grad_() for t in (self.hidden, self.table, self.bias)]
        rows = self.own if sequence_parallel else slice(None)
        hidden = self.hidden[rows].clone().requires_grad_()
        weight, bias = (self.shard.slice(t).requires_grad_() for t in (self.table, self.bias))
        got = linear_cross_entropy(
            hidden, weight, self.target[rows], shard=self.shard, linear_bias=bias if with_bias else None,
            sequence_parallel=sequence_parallel, chunk_size=16, reduction=reduction, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        want = reference.linear_cross_entropy(
            whole[0], whole[1], self.target, bias=whole[2] if with_bias else None,
            reduction=reduction, **options,
        )  # fmt: skip
        backward(got)
        backward(want)
        errors = [
            scaled(got, want),
            relative(hidden.grad, gradient(whole[0])[rows]),
            relative(weight.grad, self.shard.slice(gradient(whole[1]))),
        ]
        if with_bias:
            errors.append(relative(bias.grad, self.shard.slice(gradient(whole[2]))))
        return max(errors)

    def logprobs(self) -> float:
        """Log-probabilities, entropies and the logits' gradient of their sum."""
        whole = reference.logits(self.hidden, self.table, self.bias).double().requires_grad_()
        local = self.shard.slice(whole.detach().float(), dim=-1).requires_grad_()
        got, want = token_logprobs(local, self.target, shard=self.shard), reference.token_logprobs(whole, self.target)
        backward(got.logprob + got.entropy)
        backward(want[0] + want[1])
        errors = [scaled(rows, wanted) for rows, wanted in zip(got, want, strict=True)]
        return max(*errors, relative(local.grad, self.shard.slice(gradient(whole), dim=-1)))

    def greedy(self) -> float:
        """Rows chosen otherwise than by the oracle; must be 0."""
        whole = self._coarse_logits()
        got = greedy(self.shard.slice(whole, dim=-1, fill=99.0), shard=self.shard)
        return float((got != reference.greedy(whole)).sum())

    def top_k(self) -> float:
        """Candidates that differ in id or value; must be 0."""
        whole = self._coarse_logits()
        got = top_k(self.shard.slice(whole, dim=-1, fill=99.0), CANDIDATES, shard=self.shard)
        values, ids = reference.top_k(whole, CANDIDATES)
        return float((got.token_ids != ids).sum() + (got.values != values).sum())

    def top_p(self) -> float:
        """Tokens that are in a nucleus, short or long, or out of it otherwise than by the oracle; must be 0."""
        whole = self._coarse_logits()
        p = torch.tensor([0.1, 0.9, 1.0]).repeat(TOKENS)[:TOKENS]
        got = top_p(self.shard.slice(whole, dim=-1, fill=99.0), p, shard=self.shard)
        want = reference.nucleus(whole, p.to(whole.device))
        return float((got.kept != self.shard.slice(want, dim=-1)).sum())

    def sample(self) -> float:
        """Tokens drawn otherwise than by the oracle, each row by parameters of its own; must be 0."""
        whole, row = self._coarse_logits(), torch.arange(TOKENS)
        given = {
            "temperature": torch.tensor([0.0, 0.7, 1.0, 1.5])[row % 4],
            "top_k": torch.tensor([VOCAB, CANDIDATES, VOCAB])[row % 3],
            "top_p": torch.tensor([0.5, 0.9, 1.0, 0.9, 1.0])[row % 5],
            "min_p": torch.tensor([0.0, 0.01])[row % 2],
        }
        streams = Streams.of([0] * TOKENS, range(TOKENS))
        got = sample(self.shard.slice(whole, dim=-1, fill=99.0), shard=self.shard, streams=streams, **given)
        want = reference.sample(whole.cpu(), streams.bits(), **given)
        return float((got.token_ids.cpu() != want).sum())

    def tied(self) -> float:
        """The one parameter's gradient holds the lookup's and the projection's part."""
        embedding = VocabParallelEmbedding(WIDTH, shard=self.shard, device=self.table.device)
        head = VocabParallelLMHead(WIDTH, shard=self.shard, device=self.table.device)
        tie_weights(embedding, head)
        with torch.no_grad():
            embedding.weight.copy_(self.shard.slice(self.table))
        whole = self.table.double().requires_grad_()
        got = head.loss(embedding(self.ids), self.target)
        want = reference.linear_cross_entropy(reference.embedding(self.ids, whole), whole, self.target)
        backward(got)
        backward(want)
        return max(difference(got, want), relative(head.weight.grad, self.shard.slice(gradient(whole))))

    def _coarse_logits(self) -> Tensor:
        """Logits rounded to quarters, so that rows are full of ties."""
        return (reference.logits(self.hidden, self.table) * 4).round() / 4
