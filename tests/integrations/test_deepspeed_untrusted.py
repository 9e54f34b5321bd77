"""Files of DeepSpeed from elsewhere: what its own loader would run is refused, unless the user gives their word."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

from tests.untrusted.harm import running, torch_file
from tests.untrusted.kinds import KINDS
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations.deepspeed import universal
from vocab_parallel.integrations.deepspeed.notes import read_note
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import VocabShard

WAYS = list(running(Path("x")))


@pytest.mark.parametrize("way", WAYS)
def test_a_universal_file_runs_nothing(way: str, tmp_path: Path) -> None:
    content = running(tmp_path / "ran")[way]
    file = tmp_path / "zero" / "e.weight" / "fp32.pt"
    file.parent.mkdir(parents=True)
    table, shard = torch.nn.Parameter(torch.zeros(4, 2)), VocabShard(VocabLayout(4, 1, multiple_of=1), None)
    for data in (content, torch_file(content)):
        file.write_bytes(data)
        with pytest.raises(CheckpointLayoutError, match=r"fp32\.pt"):
            universal._local_rows(file, table, shard)
    assert not (tmp_path / "ran").exists()


def test_a_conversion_by_deepspeed_itself_asks_for_the_users_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = KINDS["DeepSpeed's model states"].make(tmp_path)
    content = torch.load(file, weights_only=True)
    torch.save(content | {"client_state": pytest.Cache}, file)
    converted = []
    fake = types.ModuleType("deepspeed.checkpoint")
    vars(fake)["ds_to_universal"] = types.SimpleNamespace(main=lambda args: converted.append(args.input_folder))
    monkeypatch.setitem(sys.modules, "deepspeed.checkpoint", fake)
    with pytest.raises(CheckpointLayoutError, match=r"model_states\.pt names _pytest"):
        universal.to_universal(tmp_path, tmp_path / "universal")
    assert not converted
    (tmp_path / "universal").mkdir()
    universal.to_universal(tmp_path, tmp_path / "universal", trusted=True)
    assert converted == [str(tmp_path)]


def test_a_note_that_cannot_be_read_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointLayoutError, match=r"cannot read .*vocab_parallel.json: No such file"):
        read_note(tmp_path / "vocab_parallel.json")  # gone between a look for it and its opening
