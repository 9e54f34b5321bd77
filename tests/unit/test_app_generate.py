"""``generate``: whole characters as they come, policies from files, and a text that is its request's alone."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ranks import run_ranks
from vocab_parallel import VocabLayout, VocabShard, app
from vocab_parallel.app.config import GenerateConfig, ModelConfig
from vocab_parallel.app.decoding import Decoding, Search, Windows, decoding_of, load_policy, search_prompts
from vocab_parallel.app.generate import generate_ids, requests_of, run
from vocab_parallel.app.model import LanguageModel
from vocab_parallel.app.vocabulary import ByteVocabulary, open_vocabulary
from vocab_parallel.app.writing import Text, Writer
from vocab_parallel.decode.policy import Policy
from vocab_parallel.errors import ConfigError

ROOT = Path(__file__).parents[2]
POLICIES = sorted((ROOT / "configs" / "policies").glob("*.yaml"))
BYTES = ByteVocabulary()
PROMPTS = ["def ", "import os", "x"]


@given(st.binary(max_size=40))
@settings(deadline=None, max_examples=300)
def test_pieces_are_the_text_of_all_bytes_and_a_character_comes_whole(data: bytes) -> None:
    text = Text(BYTES)
    pieces = [text.add(byte + 3) for byte in data]
    assert "".join(pieces) + text.end() == data.decode("utf-8", "replace")


@given(st.text(max_size=20))
@settings(deadline=None, max_examples=200)
def test_valid_text_never_shows_a_replacement_character(words: str) -> None:
    words = words.encode("utf-8", "replace").decode()
    text = Text(BYTES)
    pieces = [text.add(token) for token in BYTES.encode_batch([words])[0]]
    assert "".join(pieces) == words and text.end() == ""
    assert all(piece == "" or "\ufffd" in words or "\ufffd" not in piece for piece in pieces)


def test_tekken_gives_an_emoji_once_all_its_tokens_are_there() -> None:
    tekken = open_vocabulary("tekken")
    [ids] = tekken.encode_batch(["a 🦜🏽 é"])
    text = Text(tekken)
    pieces = [text.add(token) for token in ids]
    assert "".join(pieces) == "a 🦜🏽 é" and "" in pieces
    assert "\ufffd" in "".join(tekken.decode([token]) for token in ids), "token by token it would be broken"


def test_requests_are_shown_in_order_however_they_come() -> None:
    shown: list[str] = []
    writer = Writer(BYTES, ["A:", "B:", "C:"], shown.append)
    assert shown == ["A:"]
    for request, byte in ((1, "x"), (0, "a"), (2, "z"), (1, "y")):
        writer.add(request, ord(byte) + 3)
    assert shown == ["A:", "a"]
    writer.end(2)
    writer.end(2)
    writer.end(0)
    assert shown == ["A:", "a", "\n", "B:xy"]
    writer.add(1, ord("!") + 3)
    writer.end(1)
    assert "".join(shown) == "A:a\nB:xy!\nC:z\n"


def make(tp: int = 1) -> tuple[VocabShard, Windows]:
    shard = VocabShard(VocabLayout(BYTES.size, tp, multiple_of=8), dist.group.WORLD if tp > 1 else None)
    model = LanguageModel(ModelConfig(dim=16, layers=1, heads=2, context=12), shard, seed=3)
    with torch.no_grad():
        model.embedding.weight.mul_(10.0)  # far enough apart that no draw hangs on rounding
    return shard, Windows(lambda ids: model(ids).detach(), model.head(), 12)


def written(made: tuple[VocabShard, Windows], decoding: Decoding, prompts: list[str], **changes: Any) -> str:
    shard, model = made
    shown: list[str] = []
    requests = requests_of(dataclasses.replace(GenerateConfig(), **changes), prompts)
    run(model, requests, decoding, BYTES, shown.append, shard=shard, max_tokens=10)
    return "".join(shown)


def policy_named(name: str) -> Decoding:
    return load_policy(str(ROOT / "configs" / "policies" / f"{name}.yaml"), BYTES.size)


def ranks_write(rank: int, tp: int) -> dict[str, str]:
    made = make(tp)
    return {path.stem: written(made, policy_named(path.stem), PROMPTS) for path in POLICIES}


@pytest.mark.parametrize("tp", [2, 3])
def test_every_rank_of_any_number_writes_the_text_of_one_process(tp: int) -> None:
    expected = ranks_write(0, 1)
    assert len(set(expected.values())) == len(POLICIES)
    assert run_ranks(ranks_write, tp, tp) == [expected] * tp


@pytest.mark.parametrize("name", ["creative", "strict", "beam"])
def test_a_requests_text_is_the_same_alone_and_in_any_batch(name: str) -> None:
    made, decoding = make(), policy_named(name)
    alone = {prompt: written(made, decoding, [prompt]) for prompt in PROMPTS}
    assert len({text[len(prompt) :] for prompt, text in alone.items()}) == 3
    for order in (PROMPTS[::-1], [*PROMPTS[1:], PROMPTS[0]]):
        expected = "".join(f"--- {prompt}\n{alone[prompt]}" for prompt in order)
        assert written(made, decoding, order) == expected


def test_the_seed_and_the_name_make_the_draws() -> None:
    made, decoding = make(), policy_named("creative")
    plain = written(made, decoding, ["def "])
    assert plain == written(made, decoding, ["def "], request="def ")
    assert plain != written(made, decoding, ["def "], seed=1)
    assert plain != written(made, decoding, ["def "], request="other")
    assert [one.seed for one in requests_of(GenerateConfig(seed=9), ["a", "b"])] == [9, 9]
    assert [one.seed for one in requests_of(GenerateConfig(seed=9), ["a", "b"], seeds=[5])] == [5, 5]
    assert [one.seed for one in requests_of(GenerateConfig(seed=9), ["a", "b"], seeds=[5, 6])] == [5, 6]
    twice = written(made, decoding, ["def ", "def "])
    first, second = twice.removeprefix("--- def \n").split("--- def  #2\n")
    assert first == plain != second, "the same prompt again is another request"


def test_names_must_be_one_for_each_prompt_and_different() -> None:
    options = GenerateConfig()
    assert [one.name for one in requests_of(options, ["a", "b"], ["x", "y"])] == ["x", "y"]
    with pytest.raises(ConfigError, match="2 prompts and 1 names"):
        requests_of(options, ["a", "b"], ["x"])
    with pytest.raises(ConfigError, match="3 prompts and 2 seeds"):
        requests_of(options, ["a", "b", "c"], seeds=[1, 2])
    with pytest.raises(ConfigError, match="two requests are called 'x'"):
        requests_of(options, ["a", "b"], ["x", "x"])
    with pytest.raises(ConfigError, match="is not UTF-8"):
        requests_of(options, [os.fsdecode(b"\xff")])


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_every_policy_file_loads_and_survives_its_own_dict(path: Path, tmp_path: Path) -> None:
    decoding = load_policy(str(path), BYTES.size)
    assert decoding.policy.name == path.stem
    (tmp_path / "again.json").write_text(decoding.policy.to_json())
    again = load_policy(str(tmp_path / "again.json"), BYTES.size)
    assert again.policy.digest == decoding.policy.digest
    assert decoding.search.beams == (4 if path.stem == "beam" else 1)


def test_the_four_policy_files_are_there() -> None:
    assert {path.stem for path in POLICIES} >= {"greedy", "creative", "strict", "beam"}


def test_strict_text_is_printable_lines_of_at_least_16_bytes() -> None:
    shard, model = make()
    shown: list[str] = []
    requests = requests_of(GenerateConfig(), PROMPTS)
    run(model, requests, policy_named("strict"), BYTES, shown.append, shard=shard, max_tokens=40)
    for prompt, block in zip(PROMPTS, "".join(shown).split("--- ")[1:], strict=True):
        text = block.removeprefix(f"{prompt}\n{prompt}").removesuffix("\n")
        assert len(text) >= 16
        assert all(character == "\n" or " " <= character <= "~" for character in text)
        assert not text.startswith("\n") and "\n\n" not in text


def test_the_old_keys_make_the_policy_that_they_were() -> None:
    greedy = decoding_of(GenerateConfig(method="greedy"), 259).policy
    assert greedy.selector == "greedy" and greedy.transforms == ()
    top_k = decoding_of(GenerateConfig(k=500, temperature=0.5), 259).policy
    assert [one.to_dict() for one in top_k.transforms] == [
        {"name": "top_k", "k": 259}, {"name": "temperature", "temperature": 0.5},
    ]  # fmt: skip
    assert top_k.selector == "sample"
    searching = GenerateConfig(policy=str(ROOT / "configs/policies/beam.yaml"))
    for asked, beams in ((None, 4), (2, 2), (1, 1)):
        found = decoding_of(dataclasses.replace(searching, beams=asked), 259)
        assert found.search == Search(beams=beams, length_penalty=1.0)


def test_keys_that_make_no_policy_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"generate: temperature's temperature .*1e\+39"):
        decoding_of(GenerateConfig(temperature=1e39), 259)
    with pytest.raises(ConfigError, match=r"generate\.seed: expected a number of at most 64 bits"):
        GenerateConfig(seed=2**64)


@pytest.mark.parametrize("text", ["name: dola", "name: contrastive, k: 4"])
def test_a_policy_that_needs_more_than_logits_is_refused_before_a_training(text: str, tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(f"transforms: [{{{text}}}]")
    with pytest.raises(ConfigError, match="needs data of each step beside the logits"):
        decoding_of(GenerateConfig(policy=str(tmp_path / "more.yaml")), 259)


def test_a_policy_with_values_for_each_request_needs_that_many(tmp_path: Path) -> None:
    (tmp_path / "rows.yaml").write_text("transforms: [{name: temperature, temperature: [0.0, 1.0]}]")
    options = GenerateConfig(policy=str(tmp_path / "rows.yaml"))
    decoding_of(options, 259, 2)
    with pytest.raises(ConfigError, match=r"generate\.policy: .*2 "):
        decoding_of(options, 259)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("transforms: [{name: top_pp, p: 0.5}]", "did you mean top_p?"),
        ("transforms: [{name: top_p, q: 0.5}]", "field 'q' is unknown"),
        ("transforms: [{name: top_p, p: 1.5}]", "1.5"),
        ("transforms: [{name: suppress, token_ids: [300]}]", "300"),
        ("vocab_size: 32000\ntransforms: []", "it is for a vocabulary of 32000 ids, this one has 259"),
        ("search: {beam: 3}\ntransforms: []", "beam"),
        ("search: {beams: 0}\ntransforms: []", "search.beams: expected at least 1, got 0"),
        ("search: 4\ntransforms: []", "search: expected a section (a mapping of keys), got 4"),
        ("preset: vlm", "preset: expected one of"),
        ("preset: vllm\ntop_q: 1", "top_q"),
        ("- 1", "expected a policy, a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_bad_policy_file_is_refused_with_its_name(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(str(path), 259)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_presets_are_policies_by_name(tmp_path: Path) -> None:
    assert isinstance(load_policy("hugging_face", 259).policy, Policy)
    (tmp_path / "knobs.yaml").write_text("preset: vllm\ntemperature: 0.7\ntop_p: 0.9\n")
    names = [one.name for one in load_policy(str(tmp_path / "knobs.yaml"), 259).policy.transforms]
    (tmp_path / "knobs.json").write_text('{\n\t"preset": "vllm", "temperature": 7e-1, "top_p": 0.9}')  # no YAML 1.1
    assert [one.name for one in load_policy(str(tmp_path / "knobs.json"), 259).policy.transforms] == names
    assert "temperature" in names and "top_p" in names
    with pytest.raises(ConfigError, match=r"there is no file absent\.yaml"):
        load_policy("absent.yaml", 259)
    with pytest.raises(ConfigError, match=r"expected a \.yaml or \.json file or one of hugging_face"):
        load_policy("hugging", 259)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(ConfigError, match=r"latin\.yaml is not valid YAML"):
        load_policy(str(tmp_path / "latin.yaml"), 259)


def logprob(made: tuple[VocabShard, Windows], prompt: list[int], ids: list[int]) -> float:
    """Of a continuation, by whole log-softmaxes in float64."""
    total, prefix = 0.0, list(prompt)
    for token in ids:
        logits = made[1](torch.tensor([prefix]), torch.ones(1, dtype=torch.bool))[0, : BYTES.size]
        total += float(logits.double().log_softmax(-1)[token])
        prefix.append(token)
    return total


def test_beams_find_a_likelier_text_than_greedy_steps() -> None:
    made = make()
    prompt = [1, 3, 10]
    search = Decoding(Policy((), selector="greedy"), Search(beams=8, length_penalty=0.0))
    options = GenerateConfig(method="greedy", max_tokens=4)
    greedy = generate_ids(made[1]._hidden, made[1]._head, made[0], prompt, options, context=12, eos=2)
    found = search_prompts(made[1], [prompt], search, shard=made[0], max_tokens=4, eos=2)[0]
    assert len(found) == len(greedy) == 4
    assert logprob(made, prompt, found) > logprob(made, prompt, greedy)
    one = dataclasses.replace(search, search=Search(beams=1, length_penalty=0.0))
    assert search_prompts(made[1], [prompt], one, shard=made[0], max_tokens=4, eos=2)[0] == greedy


SETTINGS = ["data.max_bytes=60000", "model.dim=16", "model.context=24", "train.steps=2", "train.batch=2",
            "train.warmup=1", "train.validation_sequences=2", "oracle.every=0", "oracle.gradient_every=0",
            "generate.max_tokens=4"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("generate")
    status = app.main(["train", str(ROOT / "configs" / "smoke.yaml"), *SETTINGS, f"runs={place}",
                       f"data.cache={place / 'cache'}",
                       f"generate.policy={ROOT / 'configs' / 'policies' / 'strict.yaml'}"])  # fmt: skip
    assert status == 0
    [found] = place.glob("smoke-*")
    return found


def test_the_command_writes_several_prompts_and_a_trace(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    creative = str(ROOT / "configs" / "policies" / "creative.yaml")
    command = ["generate", str(folder), "--policy", creative, "--seed", "3", "generate.max_tokens=5"]
    trace = tmp_path / "trace.jsonl"
    capsys.readouterr()
    assert app.main([*command, "--prompt", "def ", "--prompt", "é", "--request", "one", "--request", "two",
                     "--trace", str(trace)]) == 0  # fmt: skip
    both = capsys.readouterr().out
    assert both.startswith("--- one\ndef ") and "\n--- two\né" in both and both.endswith("\n")
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [(line["request"], line["step"]) for line in lines if line["request"] == "one"] == [
        ("one", step) for step in range(5)
    ]
    assert lines[0].keys() >= {"token_id", "text", "margin", "entropy", "support", "legal", "removed", "raw_score",
                               "score", "logprob", "draw", "fallback"}  # fmt: skip
    assert [name for name, _ in lines[0]["removed"]] == ["repetition_penalty", "temperature", "top_p", "min_p"]
    assert app.main([*command, "--prompt", "def ", "--request", "one"]) == 0
    assert f"--- one\n{capsys.readouterr().out}" == both.split("--- two")[0]
    assert app.main([*command, "--prompt", "def ", "--request", "one", "--seed", str(2**64)]) == 2
    assert "ConfigError: --seed: expected a number of at most 64 bits" in capsys.readouterr().err
    assert app.main([*command, "--policy", "beam"]) == 2
    assert "generate.policy: expected a .yaml or .json file or one of" in capsys.readouterr().err


def test_the_runs_own_policy_is_what_its_sample_and_generate_use(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    capsys.readouterr()
    assert app.main(["generate", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown == summary["sample"] + "\n"
    printable = shown.replace("\n", "")
    assert all(" " <= character <= "~" for character in printable), "the strict policy's bytes"
    assert app.main(["generate", str(folder), "generate.beams=3"]) == 0
    assert capsys.readouterr().out.startswith("import ")
    assert app.main(["generate", str(folder), "generate.beams=3", "--trace", "x.jsonl"]) == 2
    assert "a beam search has no steps of a policy to trace" in capsys.readouterr().err
    assert app.main(["generate", str(folder), "--trace", str(folder / "absent" / "x.jsonl")]) == 2
    assert "ConfigError: --trace: " in capsys.readouterr().err
