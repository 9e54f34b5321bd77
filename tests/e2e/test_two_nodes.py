"""Two torchrun agents, as on two machines, that find each other by a c10d rendezvous on the loopback device."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from tests.e2e.launching import SETTINGS, finish, metrics, start
from vocab_parallel.checkpoint import latest_checkpoint

EXACT = ("step", "loss", "validation_loss", "gradient_norm", "oracle_loss", "oracle_gradient_difference")


def test_two_nodes_of_one_rank_train_to_the_bits_of_one_node_of_two(
    tmp_path: Path, plain: list[dict[str, Any]]
) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    environment = {"HOST": "127.0.0.1", "PORT": port, "NPROC": "1", "ADDRESS": "127.0.0.1"}
    place = tmp_path / "two"  # beside it the corpus, which both nodes start to build: storage that both see
    nodes = [start("two_nodes.sh", place, "train", *SETTINGS, **environment) for _ in range(2)]
    try:
        outputs = [finish(node) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert sum("new run" in output for output in outputs) == 1  # one rank of one node speaks
    [folder] = place.iterdir()
    latest = latest_checkpoint(folder / "checkpoints")
    assert latest is not None and latest.name == "step-00000003"
    assert [[row[key] for key in EXACT] for row in metrics(place)] == [[row[key] for key in EXACT] for row in plain]
