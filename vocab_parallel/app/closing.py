"""The end of a training: final numbers, the closing table, a sample, the report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from vocab_parallel.app import report
from vocab_parallel.app.generate import generate_ids
from vocab_parallel.app.memory import peak_extra_bytes
from vocab_parallel.errors import VocabParallelError
from vocab_parallel.loss import linear_cross_entropy

if TYPE_CHECKING:
    from vocab_parallel.app.train import Run


def close_run(run: Run, started: float) -> dict[str, Any]:
    """Measures memory, samples, writes summary and report, and prints the closing table.

    Args:
        run: a run whose steps are done.
        started: `time.perf_counter()` at the start of the job.

    Returns:
        The summary, the same on every rank.

    Raises:
        VocabParallelError: ``train.require_under_unigram`` is set and the validation loss is not under the entropy.
    """
    config, job = run.config, run.job
    memory = loss_memory(run)
    sample = _sample(run)
    summary: dict[str, Any] = job.agree(_summary(run, memory, sample, started) if job.first else None)
    if run.log is not None:
        run.log.finish(summary)
        written = report.write(run.folder)
        job.say(f"\n{table(summary)}\n\nsample: {sample!r}\n\nreport: {written}\nrun folder: {run.folder}")
    if config.train.require_under_unigram and not summary["under_unigram"]:
        raise VocabParallelError(
            f"train.require_under_unigram: validation loss {summary['validation_loss']:.3f} nats is NOT under the "
            f"corpus's unigram entropy {summary['unigram_entropy']:.3f}; train longer (train.steps) or on more text"
        )
    return summary


def loss_memory(run: Run) -> int:
    """Bytes that one fused loss, forward and backward, needs beside its inputs, at the training's shape.

    Collectives: those of one loss.
    """
    config, head = run.config, run.host.head()
    tokens = config.train.batch * config.model.context
    hidden = torch.zeros(tokens, config.model.dim, device=run.job.device, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.int64, device=run.job.device)
    weight = head.weight.requires_grad_()
    bias = None if head.bias is None else head.bias.requires_grad_()

    def once() -> None:
        loss = linear_cross_entropy(
            hidden, weight, target, shard=run.shard, linear_bias=bias, chunk_size=config.train.chunk_size
        )
        loss.backward()  # type: ignore[no-untyped-call]

    return peak_extra_bytes(once, run.job.device)


def table(summary: Mapping[str, Any]) -> str:
    """The closing table as aligned plain text."""
    rows = table_rows(summary)
    left = max(len(row[0]) for row in rows)
    middle = max(len(row[1]) for row in rows)
    return "\n".join(f"{name:<{left}}  {value:>{middle}}  {note}" for name, value, note in rows)


def table_rows(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and note of each closing number."""
    calls = summary["collectives_per_step"]
    verdict = "under" if summary["under_unigram"] else "NOT under"
    entropy = summary["unigram_entropy"]
    return [
        ("train loss", f"{summary['train_loss']:.4f} nats", f"mean of the last {summary['averaged_steps']} steps"),
        ("validation loss", f"{summary['validation_loss']:.4f} nats", f"{verdict} the unigram entropy"),
        ("unigram entropy", f"{entropy:.4f} nats", "of the corpus, a token"),
        ("oracle, loss", _number(summary["oracle_difference"], " nats"), "largest difference to one rank, float64"),
        (
            "oracle, gradient",
            _number(summary["oracle_gradient_difference"], ""),
            "the same, over its largest entry",
        ),
        (
            "bytes sent",
            f"{summary['bytes_sent_per_step']:,}",
            f"a step and rank, {calls} calls",
        ),
        ("loss memory", _mb(summary["loss_memory_bytes"]), "a rank, beside the inputs, forward and backward"),
        ("whole logits", _mb(summary["whole_logits_bytes"]), summary["whole_logits"]),
        ("peak memory", _mb(summary["peak_memory_bytes"]), "of the first rank's process, the oracle's work included"),
        ("throughput", f"{summary['tokens_per_second']:,.0f} tokens/s", "checks and validation not counted"),
        ("time", f"{summary['seconds']:.1f} s", f"of that {summary['oracle_seconds']:.1f} s the oracle"),
    ]


def _summary(run: Run, memory: int, sample: str, started: float) -> dict[str, Any]:
    """The numbers that outlive the run; on the first rank, which holds all rows."""
    config, rows = run.config, run.rows
    averaged = min(config.train.average_last, len(rows))
    tokens = config.train.batch * config.model.context
    vocab_size = run.shard.vocab_size
    validation = [row["validation_loss"] for row in rows if row["validation_loss"] is not None]
    seconds = sum(row["seconds"] for row in rows)
    return {
        "run": str(run.folder),
        "steps": len(rows),
        "train_loss": sum(row["loss"] for row in rows[-averaged:]) / averaged,
        "averaged_steps": averaged,
        "validation_loss": validation[-1],
        "unigram_entropy": run.corpus.unigram_entropy,
        "under_unigram": validation[-1] < run.corpus.unigram_entropy,
        "oracle_difference": _largest(rows, "oracle_difference"),
        "oracle_gradient_difference": _largest(rows, "oracle_gradient_difference"),
        "bytes_sent_per_step": rows[-1]["bytes_sent"],
        "collectives_per_step": rows[-1]["collectives"],
        "loss_memory_bytes": memory,
        "whole_logits_bytes": tokens * vocab_size * 4,
        "whole_logits": f"{tokens:,} tokens x {vocab_size:,} ids x 4 bytes, for scale: float32, once",
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in rows),
        "tokens_per_second": tokens * len(rows) / seconds,
        "seconds": time.perf_counter() - started,
        "oracle_seconds": run.oracle_seconds,
        "sample": sample,
    }


def _sample(run: Run) -> str:
    options = run.config.generate
    prompt = [run.vocabulary.bos, *run.vocabulary.encode_batch([options.prompt])[0]]
    host, context = run.host, run.config.model.context
    ids = generate_ids(host.hidden, host.head(), run.shard, prompt, options, context=context, eos=run.vocabulary.eos)
    return options.prompt + run.vocabulary.decode(ids)


def _largest(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return max(values) if values else None


def _number(value: float | None, unit: str) -> str:
    return "not measured" if value is None else f"{value:.2e}{unit}"


def _mb(value: int) -> str:
    return f"{value / 1e6:,.1f} MB"
