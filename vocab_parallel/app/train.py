"""The main job: train a small tied language model with its vocabulary sharded over the ranks, checked as it goes."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.app import config as configs
from vocab_parallel.app import oracle, restart, runlog
from vocab_parallel.app.config import HOSTS, Config
from vocab_parallel.app.data import Corpus, open_corpus
from vocab_parallel.app.decoding import decoding_of
from vocab_parallel.app.hosts import host_class, open_host
from vocab_parallel.app.job import Job, builds_files, join
from vocab_parallel.app.memory import peak_process_bytes
from vocab_parallel.app.optim import learning_rate
from vocab_parallel.app.progress import Progress
from vocab_parallel.app.vocabulary import Vocabulary, open_vocabulary
from vocab_parallel.checkpoint.together import agree, caught
from vocab_parallel.checkpoint.writing import MANIFEST
from vocab_parallel.errors import ConfigError, VocabParallelError
from vocab_parallel.shard import RankGroup
from vocab_parallel.vocabulary.manifest import (
    LossContract,
    Manifest,
    PolicyContract,
    RandomnessContract,
    require_loadable,
)


def train(config: Config) -> dict[str, Any]:
    """Runs a training from start, or from ``train.resume``, to its end.

    With ``run`` it is the one in that folder: begun if it is not there, else continued from its newest checkpoint that
    is whole. The same command can so be started again, by hand or by ``torchrun --max-restarts``, and ends with the
    same losses, bit for bit (see `restart`).

    Returns:
        The summary, the same on every rank; the run folder holds everything else.

    Raises:
        ConfigError: something in the configuration cannot work.
        VocabParallelError: the oracle differs by more than ``oracle.max_*_difference``, or
            ``train.require_under_unigram`` is set and the validation loss did not get under.
    """
    started = time.perf_counter()
    vocabulary = open_vocabulary(config.data.vocab)
    decoding_of(config.generate, vocabulary.size)  # a bad policy must not end a training at its sample
    corpus = _corpus(config, vocabulary)
    host_class(config.host)  # imports the stack, or says that it is missing, before the ranks wait for each other
    with join(config.parallel) as job:
        run = Run(config, job, vocabulary, corpus)
        try:
            run.steps()
            # Imported here: closing needs plots and generation, which a step does not.
            from vocab_parallel.app.closing import close_run

            return close_run(run, started)
        except Exception:
            run.host.finish_saving(failed=True)
            raise
        finally:
            run.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``train``."""
    parser.add_argument("source", help="a YAML config, or a run folder to resume")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example train.steps=10")
    parser.add_argument("--host", choices=HOSTS, help="the stack to train in; the same as host=")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel train``."""
    config = configs.load(args.source, [*args.overrides, *([f"host={args.host}"] if args.host else [])])
    if Path(args.source).is_dir() and config.train.resume is None:
        if config.run is not None:
            raise ConfigError(f"run={config.run}: expected a YAML file before it, got the run folder {args.source}")
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, resume=args.source))
    train(config)
    return 0


class Run:
    """Model, optimizer, data and logs of one training on one rank."""

    def __init__(self, config: Config, job: Job, vocabulary: Vocabulary, corpus: Corpus) -> None:
        self.config, self.job, self.vocabulary, self.corpus = config, job, vocabulary, corpus
        self.host = open_host(config, job, vocabulary.size)
        self.model, self.shard = self.host.model, self.host.shard
        self.folder, checkpoint = self._place()
        self.first_step = 1 if checkpoint is None else self._load(checkpoint) + 1
        self.log: runlog.RunLog | None = None
        self.rows: list[dict[str, Any]] = []
        fault = caught(f"{self.folder} could not be written to", self._open_log) if job.first else None
        agree(RankGroup(job.group), "open the run's log", fault)
        self.training_seconds = 0.0
        self.oracle_seconds = 0.0
        job.say(self._opening())

    def _open_log(self) -> None:
        """On the first rank: the lines of the steps before, and what the run is."""
        # A resumed run belongs to its folder wherever that is; these two are of one launch.
        kept = dataclasses.replace(self.config, run=None, train=dataclasses.replace(self.config.train, resume=None))
        self.log = runlog.RunLog(self.folder, resume_step=self.first_step - 1 if self.first_step > 1 else None)
        self.log.describe(kept, self.manifest())
        self.rows = runlog.read_metrics(self.folder)

    def steps(self) -> None:
        """All steps that are left, with validation, checks and checkpoints."""
        train = self.config.train
        with Progress(train.steps, self.first_step - 1, visible=self.job.first) as progress:
            for step in range(self.first_step, train.steps + 1):
                row = self.step(step)
                last = step == train.steps
                if last or (train.validation_every and step % train.validation_every == 0):
                    row["validation_loss"] = self.validate()
                self.rows.append(row)
                if self.log is not None:
                    self.log.step(row)  # before the save: a checkpoint's own step must never lack its line
                if last or (train.checkpoint_every and step % train.checkpoint_every == 0):
                    self.save(step)
                progress.show(row)
        self.host.finish_saving()

    def step(self, step: int) -> dict[str, Any]:
        """One optimizer step. Returns its line for ``metrics.jsonl``."""
        host, traffic = self.host, self.shard.traffic
        begin = time.perf_counter()
        input, target = self._batch(step)
        traffic.reset()
        hidden, loss = host.forward(input, target)
        host.backward(loss)
        sent, calls = traffic.total_bytes, traffic.total_calls
        checked = time.perf_counter()
        difference = self._check(step, hidden.flatten(0, 1), target.flatten(), loss.detach())
        oracle_seconds = time.perf_counter() - checked
        traffic.reset()
        rate = learning_rate(self.config.train, step)
        norm = host.step(rate)
        seconds = time.perf_counter() - begin - oracle_seconds
        self.training_seconds += seconds
        self.oracle_seconds += oracle_seconds
        return {
            "step": step,
            "loss": float(loss.detach()),
            "validation_loss": None,
            "oracle_loss": difference.oracle_loss if difference else None,
            "oracle_difference": difference.loss if difference else None,
            "oracle_gradient_difference": difference.gradient if difference else None,
            "tokens_per_second": target.numel() * self.job.replicas.size / seconds,
            "peak_memory_bytes": peak_process_bytes(self.job.device),
            "bytes_sent": sent + traffic.total_bytes,
            "collectives": calls + traffic.total_calls,
            "learning_rate": rate,
            "gradient_norm": norm,
            "seconds": seconds,
        }

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss in nats over the validation windows, the same on every rank; every replica reads all of them."""
        config = self.config
        total, tokens = 0.0, 0
        batches = self.corpus.validation_batches(
            config.train.validation_sequences, config.train.batch, config.model.context
        )
        for input, target in batches:
            goal = torch.from_numpy(target).to(self.job.device)
            _, loss = self.host.forward(torch.from_numpy(input).to(self.job.device), goal)
            total += float(loss) * goal.numel()
            tokens += goal.numel()
        return total / tokens

    def save(self, step: int) -> None:
        """Writes the checkpoint of `step`."""
        extra = {"vocabulary": self.config.data.vocab, "vocabulary_sha256": self.vocabulary.sha256}
        identity = self.vocabulary.identity
        self.host.save(self.folder / "checkpoints", step, extra, manifest=self.manifest(), identity=identity)

    def manifest(self) -> Manifest:
        """What the run is: the same on every rank."""
        config, corpus = self.config, self.corpus
        policy = decoding_of(config.generate, self.shard.vocab_size).policy
        return Manifest.of(
            self.model,
            identity=self.vocabulary.identity,
            loss=LossContract(),
            policy=PolicyContract.of(policy, stop_ids=[self.vocabulary.eos]),
            randomness=RandomnessContract(seed=config.generate.seed),
            host=config.host,
            notes={
                "vocabulary": config.data.vocab,
                "replicas": self.job.replicas.size,
                "parameters": self.host.trunk_parameters + self.shard.vocab_size * config.model.dim,
                "corpus": {
                    "documents": corpus.documents,
                    "text_bytes": corpus.text_bytes,
                    "train_tokens": corpus.train.length,
                    "validation_tokens": corpus.validation.length,
                    "unigram_entropy": corpus.unigram_entropy,
                    "validation_unigram_entropy": corpus.validation_entropy,
                },
            },
        )

    def close(self) -> None:
        """Closes the logs."""
        if self.log is not None:
            self.log.close()

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        config = self.config
        pair = self.corpus.train_batch(config.train.seed, step, config.train.batch, config.model.context)
        replica, share = self.job.replicas.rank, config.train.batch // self.job.replicas.size
        own = slice(replica * share, (replica + 1) * share)
        input, target = (torch.from_numpy(ids[own]).to(self.job.device) for ids in pair)
        return input, target

    def _check(self, step: int, hidden: Tensor, target: Tensor, loss: Tensor) -> oracle.Difference | None:
        """The oracle's comparison where one is due; an excess raises on every rank."""
        config = self.config.oracle
        gradients = config.gradient_every > 0 and step % config.gradient_every == 0
        if not gradients and not (config.every and step % config.every == 0):
            return None
        found = oracle.check(
            self.job, self.shard, self.host.head(), hidden, target, loss,
            gradients=gradients, chunk_rows=config.chunk_rows, chunk_size=self.config.train.chunk_size,
        )  # fmt: skip
        limits = ((found.loss, config.max_loss_difference), (found.gradient, config.max_gradient_difference))
        for name, (value, limit) in zip(("loss", "gradient"), limits, strict=True):
            # `not <=` and not `>`: NaN differs too.
            if value is not None and limit is not None and not value <= limit:
                raise VocabParallelError(
                    f"step {step}: the sharded {name} differs from the single-rank oracle by {value:.3g}, more than "
                    f"oracle.max_{name}_difference={limit:g}"
                )
        return found

    def _place(self) -> tuple[Path, Path | None]:
        """The run folder, and the checkpoint in it to go on from, if any; the same on every rank."""
        config, job = self.config, self.job
        if config.run is not None:
            return restart.find_place(config, job)
        if config.train.resume is None:
            return Path(job.agree(str(runlog.new_folder(config)) if job.first else "")), None
        folder = Path(config.train.resume)
        latest = job.agree(self.host.latest(folder / "checkpoints"))  # one that is new is not seen everywhere
        if latest is None:
            raise ConfigError(
                f"nothing to resume: {folder}/checkpoints holds no whole checkpoint of host={config.host}"
            )
        return folder, latest

    def _load(self, latest: Path) -> int:
        """Its step, after the gate of the manifest."""

        def compare() -> None:
            own = (latest / MANIFEST).is_file()  # else the run's: every checkpoint of a run is of one kind
            saved = latest if own else latest.parents[1]
            require_loadable(Manifest.read(saved), self.manifest(), where=str(latest))

        agree(RankGroup(self.job.group), f"resume {latest.name}", caught(f"{latest} cannot be resumed", compare))
        return self.host.load(latest, vocabulary_sha256=self.vocabulary.sha256)

    def _opening(self) -> str:
        corpus, layout, config = self.corpus, self.shard.layout, self.config
        begin = "new run" if self.first_step == 1 else f"resuming at step {self.first_step}"
        replicas = self.job.replicas.size
        host = "" if config.host == "plain" else f"; host {config.host}"
        return (
            f"{begin}: {self.folder}\n"
            f"vocabulary {config.data.vocab}: {layout}; device {self.job.device}{host}"
            f"{f'; {replicas} data-parallel replicas' if replicas > 1 else ''}\n"
            f"corpus: {corpus.documents} documents, {corpus.train.length:,} training and "
            f"{corpus.validation.length:,} validation tokens; unigram entropy {corpus.unigram_entropy:.3f} nats a token"
        )


def _corpus(config: Config, vocabulary: Vocabulary) -> Corpus:
    """Before the ranks join, so that a long tokenising meets no timeout."""
    return open_corpus(config.data, vocabulary, seed=config.train.seed, builds=builds_files())
