"""Text from a run folder: several prompts at once, by a policy, the vocabulary sharded as it was in training."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from vocab_parallel.app import config as configs
from vocab_parallel.app.config import Config, GenerateConfig, check_seed
from vocab_parallel.app.decoding import Decoding, Windows, continue_prompts, decoding_of, search_prompts
from vocab_parallel.app.hosts import host_class, open_host
from vocab_parallel.app.job import Job, join
from vocab_parallel.app.model import Head
from vocab_parallel.app.vocabulary import Vocabulary, open_vocabulary
from vocab_parallel.app.writing import Writer
from vocab_parallel.decode.rollout import Advance
from vocab_parallel.errors import ConfigError
from vocab_parallel.select.streams import Streams
from vocab_parallel.shard import VocabShard


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt; with the seed its name makes the random numbers, whatever else is in the batch."""

    prompt: str
    name: str
    seed: int


def generate(folder: Path, config: Config, requests: Sequence[Request] = (), *, trace: Path | None = None) -> str:
    """Loads a run folder's latest checkpoint and continues the requests, by default ``generate.prompt``.

    The first rank shows the text as it comes.

    Args:
        trace: a file for one JSON line a token and request: what the policy saw and did (`StepTrace`).

    Returns:
        What was shown: prompt and continuation, of several requests one after the other, each under its name. The same
        on every rank.

    Raises:
        ConfigError: no checkpoint there, a policy that cannot be used, or a trace that cannot be written.
        CheckpointLayoutError: it does not fit: another vocabulary or model, or for the hosts megatron and deepspeed
            another number of ranks.
    """
    vocabulary = open_vocabulary(config.data.vocab)
    requests = requests or requests_of(config.generate, [config.generate.prompt])
    decoding = decoding_of(config.generate, vocabulary.size, len(requests))
    if trace is not None and decoding.search.beams > 1:
        raise ConfigError("--trace: a beam search has no steps of a policy to trace; use generate.beams=1")
    latest = host_class(config.host).latest(folder / "checkpoints")
    if latest is None:
        raise ConfigError(f"{folder}/checkpoints holds no whole checkpoint: expected a run folder that `train` wrote")
    with join(config.parallel) as job:
        host = open_host(config, job, vocabulary.size)
        host.load(latest, vocabulary_sha256=vocabulary.sha256, weights_only=True)
        pieces: list[str] = []

        def show(text: str) -> None:
            pieces.append(text)
            if job.first:
                print(text, end="", flush=True)

        model = Windows(host.hidden, host.head(), config.model.context)
        with trace_file(trace, job) as lines:
            run(model, requests, decoding, vocabulary, show, shard=host.shard,
                max_tokens=config.generate.max_tokens, traced=trace is not None, lines=lines)  # fmt: skip
        return "".join(pieces).removesuffix("\n")


def run(
    model: Windows,
    requests: Sequence[Request],
    decoding: Decoding,
    vocabulary: Vocabulary,
    show: Callable[[str], None],
    *,
    shard: VocabShard,
    max_tokens: int,
    traced: bool = False,
    lines: IO[str] | None = None,
) -> None:
    """Continues requests and shows their text as it comes.

    Args:
        traced: trace the steps; the same on every rank, as tracing exchanges something.
        lines: where this rank writes the trace.
    """
    prompts = [[vocabulary.bos, *ids] for ids in vocabulary.encode_batch([one.prompt for one in requests])]
    many = len(requests) > 1
    openings = [f"--- {one.name}\n{one.prompt}" if many else one.prompt for one in requests]
    writer = Writer(vocabulary, openings, show)
    options: dict[str, Any] = {"shard": shard, "max_tokens": max_tokens, "eos": vocabulary.eos}
    if decoding.search.beams > 1:
        for row, ids in enumerate(search_prompts(model, prompts, decoding, **options)):
            for token_id in ids:
                writer.add(row, token_id)
            writer.end(row)
        return
    streams = Streams.of(
        [one.seed for one in requests], [one.name for one in requests], shard=shard, device=model.device
    )  # fmt: skip
    for step in continue_prompts(model, prompts, decoding, streams, trace=traced, **options):
        for row, token_id in enumerate(step.token_ids.tolist()):
            if token_id >= 0 and token_id != vocabulary.eos:
                writer.add(row, token_id)
            if bool(step.ended[row]):
                writer.end(row)
        if lines is not None:
            lines.writelines(json.dumps(line) + "\n" for line in traces(step, requests, vocabulary))
    for row in range(len(requests)):
        writer.end(row)


def trace_file(path: Path | None, job: Job) -> AbstractContextManager[IO[str] | None]:
    """The first rank's file for a trace; elsewhere, and without a path, None.

    Raises:
        ConfigError: on every rank, if it cannot be written.
    """
    if path is None:
        return nullcontext()
    lines, fault = None, None
    if job.first:
        try:
            lines = path.open("w", encoding="utf-8")
        except OSError as error:
            fault = str(error)
    fault = job.agree(fault)
    if fault is not None:
        raise ConfigError(f"--trace: {fault}")
    return nullcontext() if lines is None else lines


def traces(step: Advance, requests: Sequence[Request], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """What one step did, a JSON-able dict for each request that it was for."""
    assert step.trace is not None
    found = []
    for line in step.trace.to_dicts():
        row = line.pop("row")
        token_id = int(step.token_ids[row])
        found.append({
            "request": requests[row].name, "step": int(step.view.step[row]) - 1, "token_id": token_id,
            "text": vocabulary.decode([token_id]), **line,
        })  # fmt: skip
    return found


def generate_ids(
    hidden: Callable[[Tensor], Tensor],  # [1, S] -> [1, S, D]
    head: Head,
    shard: VocabShard,
    prompt: Sequence[int],
    options: GenerateConfig,
    *,
    context: int,
    eos: int,
) -> list[int]:
    """Continues one prompt as the section ``generate`` says, the same ids on every rank.

    Args:
        hidden: the model's hidden states, the same on every rank.
        head: this rank's rows of its head.
        shard: their ids.
        prompt: at least one token id.
        context: tokens that the model attends over.
        eos: ends the text; not part of the result.

    Returns:
        The new ids, at most ``options.max_tokens``.
    """
    model, decoding = Windows(hidden, head, context), decoding_of(options, shard.vocab_size)
    if decoding.search.beams > 1:
        return search_prompts(model, [prompt], decoding, shard=shard, max_tokens=options.max_tokens, eos=eos)[0]
    [request] = requests_of(options, [options.prompt])
    streams = Streams.of([request.seed], [request.name], device=model.device)
    steps = continue_prompts(model, [prompt], decoding, streams, shard=shard, max_tokens=options.max_tokens, eos=eos)
    ids = [int(step.token_ids[0]) for step in steps]
    return ids[:-1] if ids[-1] == eos else ids


def requests_of(
    options: GenerateConfig, prompts: Sequence[str], names: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[Request]:
    """The requests of some prompts.

    Names that are not given are the prompts themselves, with a number where one comes again: so a request's text is the
    same alone and in a batch. One seed is for all; without any it is ``generate.seed``.

    Raises:
        ConfigError: another number of names or seeds than prompts, one name twice, or text that is no UTF-8.
    """
    if len(seeds) not in (0, 1, len(prompts)):
        raise ConfigError(f"{len(prompts)} prompts and {len(seeds)} seeds: give one --seed for all, or one each")
    seeds = seeds if len(seeds) == len(prompts) else [*seeds, options.seed][:1] * len(prompts)
    for text in (*prompts, *names):
        if text.encode("utf-8", "replace").decode() != text:
            raise ConfigError(f"{text!r} is not UTF-8")
    given = list(names) or ([options.request] if options.request is not None else [])
    if given and len(given) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts and {len(given)} names: give each prompt its --request, or none")
    seen: Counter[str] = Counter()
    made = []
    for at, prompt in enumerate(prompts):
        seen[prompt] += 1
        name = given[at] if given else prompt if seen[prompt] == 1 else f"{prompt} #{seen[prompt]}"
        made.append(Request(prompt, name, seeds[at]))
    twice = [name for name, count in Counter(one.name for one in made).items() if count > 1]
    if twice:
        raise ConfigError(f"two requests are called {twice[0]!r}: with one seed they would draw the same numbers")
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``generate``."""
    parser.add_argument("source", help="a run folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example generate.max_tokens=20")
    parser.add_argument("--prompt", action="append", help="text to continue, as generate.prompt=; may be repeated")
    parser.add_argument("--policy", help="a policy file (YAML, JSON) or a preset's name, as generate.policy=")
    parser.add_argument(
        "--seed", action="append", type=int, default=[], help="as generate.seed=; one for all prompts, or one each"
    )
    parser.add_argument(
        "--request", action="append", default=[], help="a prompt's name, one each; else the prompt itself"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write what each step did as JSON lines")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel generate``."""
    if not Path(args.source).is_dir():
        raise ConfigError(f"{args.source} is not a folder: expected a run folder that `train` wrote")
    config = configs.load(args.source, args.overrides)
    for seed in args.seed:
        check_seed("--seed", seed)
    options = config.generate if args.policy is None else dataclasses.replace(config.generate, policy=args.policy)
    config = dataclasses.replace(config, generate=options)
    requests = requests_of(options, args.prompt or [options.prompt], args.request, args.seed)
    generate(Path(args.source), config, requests, trace=args.trace)
    return 0
