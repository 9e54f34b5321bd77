"""The app's settings: files, overrides, and what is refused and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from vocab_parallel.app.config import Config, from_dict, from_overrides, load
from vocab_parallel.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_there_are_config_files() -> None:
    assert {path.stem for path in CONFIGS} >= {"quickstart", "smoke"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_loads_and_survives_its_own_yaml(path: Path, tmp_path: Path) -> None:
    config = load(path)
    assert config.name == path.stem
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load(tmp_path) == config  # a run folder is read by its config.yaml


def test_the_quickstart_checks_every_step_on_the_whole_tekken_vocabulary() -> None:
    config = load(CONFIGS[0].with_name("quickstart.yaml"))
    assert config.data.vocab == "tekken" and config.data.paths == [] and config.data.max_bytes is None
    assert config.oracle.every == 1 and config.oracle.gradient_every > 0


def test_overrides_are_yaml_values() -> None:
    config = from_overrides(
        ["train.steps=10", "train.lr=1e-2", "data.paths=[a.txt, b]", "data.max_bytes=null", "generate.prompt='def '",
         "model.head_bias=true", "train.betas=[0, 0.5]"]
    )  # fmt: skip
    assert config.train.steps == 10 and config.train.lr == 0.01 and config.train.betas == [0, 0.5]
    assert config.data.paths == ["a.txt", "b"] and config.data.max_bytes is None
    assert config.generate.prompt == "def " and config.model.head_bias is True


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.step=3", "unknown key train.step; did you mean train.steps?"),
        ("trian.steps=3", "unknown key trian; did you mean train?"),
        ("train.tp=2", "did you mean parallel.tp?"),
        ("train.zzzzzz=2", "unknown key train.zzzzzz; known here: steps, batch"),
        ("train.steps=many", "train.steps: expected a whole number, got 'many'"),
        ("train.steps=1.5", "train.steps: expected a whole number, got 1.5"),
        ("train.steps=true", "train.steps: expected a whole number, got True"),
        ("train.lr=fast", "train.lr: expected a number, got 'fast'"),
        ("parallel.tp=two", "parallel.tp: expected a whole number or null, got 'two'"),
        ("data.paths=a.txt", "data.paths: expected a list, each text, got 'a.txt'"),
        ("data.paths=[1]", "data.paths"),
        ("model.head_bias=1", "model.head_bias: expected true or false, got 1"),
        ("train.steps=0", "train.steps: expected at least 1, got 0"),
        ("train.betas=[0.9]", "train.betas: expected two numbers in [0, 1), got [0.9]"),
        ("train.betas=[0.9, 1.0]", "train.betas"),
        ("data.validation_fraction=1.0", "data.validation_fraction: expected between 0 and 1"),
        ("data.vocab=teken", "expected one of tekken, bytes, a tokenizer's path, got 'teken'; did you mean tekken?"),
        ("model.heads=3", "model.dim: expected a multiple of 2 * model.heads = 6"),
        ("name=a/b", "name: expected letters"),
        ("train=3", "train: expected a section"),
        ("train.steps", "expected dotted.key=value"),
        ("train.steps=[1", "not valid YAML"),
        ("name.x=1", "name"),
        ("host=deepsped", "plain, deepspeed, megatron, transformers, fsdp, got 'deepsped'; did you mean deepspeed?"),
        ("host_config=zero1.json", "host_config: expected null with host=plain (deepspeed has one)"),
    ],
)
def test_a_bad_override_is_refused_by_name(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_overrides([override])
    assert words in str(caught.value)


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration at"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match=r"no configuration at .*config\.yaml"):
        load(tmp_path)
    for text, words in (("a: [", "not valid YAML"), ("- 1", "expected a mapping")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=words):
            load(tmp_path / "bad.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert load(tmp_path / "empty.yaml") == Config() == from_dict({})
