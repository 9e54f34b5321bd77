"""Text from a run folder: greedy or top-k, the vocabulary sharded as it was in training."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel.app import config as configs
from vocab_parallel.app.config import Config, GenerateConfig
from vocab_parallel.app.hosts import host_class, open_host
from vocab_parallel.app.job import join
from vocab_parallel.app.model import Head
from vocab_parallel.app.vocabulary import open_vocabulary
from vocab_parallel.errors import ConfigError
from vocab_parallel.select import greedy, top_k
from vocab_parallel.shard import VocabShard


@torch.no_grad()
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
    """Continues `prompt`, the same ids on every rank.

    Only the last position is projected onto the vocabulary. For top-k, the drawn number comes from one seeded generator
    that every rank holds alike, and the candidates are the same bits everywhere, so no rank has to tell the others.
    The last `context` tokens are read again for each new one: the trunk is small beside the projection.

    Args:
        hidden: the model's hidden states, the same on every rank.
        head: this rank's rows of its head.
        shard: their ids.
        prompt: at least one token id.
        options: method, k, temperature, seed, how many tokens.
        context: tokens that the model attends over.
        eos: ends the text; not part of the result.

    Returns:
        The new ids, at most ``options.max_tokens``.

    Collectives:
        For each token those of one embedding lookup and one greedy or top-k selection.
    """
    device = head.weight.device
    generator = torch.Generator().manual_seed(options.seed)
    ids = list(prompt)
    for _ in range(options.max_tokens):
        last = hidden(torch.tensor([ids[-context:]], device=device))[:, -1]
        logits = F.linear(last, head.weight, head.bias)
        if options.method == "greedy":
            token = int(greedy(logits, shard=shard))
        else:
            best = top_k(logits, min(options.k, shard.vocab_size), shard=shard)
            weights = torch.softmax(best.values[0].double().cpu() / options.temperature, dim=-1)
            drawn = int(torch.multinomial(weights, 1, generator=generator))
            token = int(best.token_ids[0, drawn])
        if token == eos:
            break
        ids.append(token)
    return ids[len(prompt) :]


def generate(folder: Path, config: Config) -> str:
    """Loads a run folder's latest checkpoint and continues ``generate.prompt``.

    Returns:
        Prompt and continuation, the same on every rank.

    Raises:
        ConfigError: no checkpoint there.
        CheckpointLayoutError: the number of ranks is not that of the training.
    """
    vocabulary = open_vocabulary(config.data.vocab)
    latest = host_class(config.host).latest(folder / "checkpoints")
    if latest is None:
        raise ConfigError(f"{folder}/checkpoints holds no whole checkpoint: expected a run folder that `train` wrote")
    with join(config.parallel) as job:
        host = open_host(config, job, vocabulary.size)
        host.load(latest, vocabulary_sha256=vocabulary.sha256, weights_only=True)
        prompt = [vocabulary.bos, *vocabulary.encode_batch([config.generate.prompt])[0]]
        context = config.model.context
        ids = generate_ids(
            host.hidden, host.head(), host.shard, prompt, config.generate, context=context, eos=vocabulary.eos
        )
        text = config.generate.prompt + vocabulary.decode(ids)
        job.say(text)
        return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``generate``."""
    parser.add_argument("source", help="a run folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for example generate.method=greedy")
    parser.add_argument("--prompt", help="text to continue; the same as generate.prompt=")


def main(args: argparse.Namespace) -> int:
    """Entry of ``python -m vocab_parallel generate``."""
    if not Path(args.source).is_dir():
        raise ConfigError(f"{args.source} is not a folder: expected a run folder that `train` wrote")
    config = configs.load(args.source, args.overrides)
    if args.prompt is not None:
        config = dataclasses.replace(config, generate=dataclasses.replace(config.generate, prompt=args.prompt))
    generate(Path(args.source), config)
    return 0
