"""The project's own files: they parse, they agree with each other, and they hold no trace of one machine."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
HOSTS = ["megatron", "deepspeed", "transformers", "fsdp"]
SCRIPTS = ["scripts/lib.sh", "scripts/quickstart", "scripts/test", "scripts/check", "scripts/bench",
           "scripts/docs", "scripts/fuzz", "scripts/chaos", ".ci/run",
           "launch/local.sh", "launch/two_nodes.sh", "launch/slurm.sbatch",
           *(f"launch/{host}.sh" for host in HOSTS)]  # fmt: skip
LOCKS = ["quickstart", "dev", "dev-data", "data", "bench", "hosts"]
EXTRAS = {"train", "megatron", "deepspeed", "transformers", "vocabulary", "kernels", "dev"}
UNPINNED = ["triton ; sys_platform == 'linux'"]  # a CUDA build of torch names its own version
PIN = re.compile(r"([a-z0-9-]+)==[0-9][^\s;*]*( ; .+)?")


def commands(path: str) -> list[list[str]]:
    """The commands of a shell script that has one command a line: words of each line, continuations joined."""
    text = (ROOT / path).read_text().replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def lock_lines(name: str) -> list[str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def locked(name: str) -> set[str]:
    """Names of the distributions that a lock file pins, those of the files it includes among them."""
    names: set[str] = set()
    for line in lock_lines(name):
        if line.startswith("-r "):
            names |= locked(line[3:].removesuffix(".txt"))
        else:
            names.add(line.partition("==")[0])
    return names


def distribution(requirement: str) -> str:
    """The normalised name in a requirement such as `PyYAML>=6`."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s<>=!~;\[]", requirement)[0]).lower()


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("path", SCRIPTS)
def test_shell_files_parse(path: str) -> None:
    result = subprocess.run(["bash", "-n", ROOT / path], capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path not in ("scripts/lib.sh", "launch/slurm.sbatch")])
def test_commands_are_executable(path: str) -> None:
    assert (ROOT / path).stat().st_mode & 0o111, f"{path} is not executable"


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path != "scripts/lib.sh"])
def test_scripts_stop_at_the_first_failure(path: str) -> None:
    assert ["set", "-euo", "pipefail"] in commands(path)


def test_ci_calls_check_and_test_and_nothing_else() -> None:
    lines = [words for words in commands(".ci/run") if words[0] not in ("set", "cd")]
    assert lines == [["scripts/check"], ["COVERAGE=1", "scripts/test"], ["scripts/check", "coverage"]]


def test_quickstart_runs_the_main_job_and_passes_its_arguments() -> None:
    expected = "exec torchrun --standalone --nproc-per-node 2 -m vocab_parallel train configs/quickstart.yaml $@"
    assert commands("scripts/quickstart")[-1] == expected.split()


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.startswith("launch/")])
def test_launch_files_hold_environment_and_one_torchrun_line(path: str) -> None:
    lines = commands(path)
    assert [line for line in lines if "torchrun" in line] == [lines[-1]]
    host = Path(path).stem
    job = ["train", "--host", host] if host in HOSTS else []
    assert lines[-1][lines[-1].index("-m") :] == ["-m", "vocab_parallel", *job, "$@"]
    environment = [line for line in lines[:-1] if line[0] not in ("set", "cd", "export")]
    assert all("=" in line[0] for line in environment), environment


def test_kubernetes_file_runs_torchrun_on_every_node_of_the_job() -> None:
    service, job = yaml.safe_load_all((ROOT / "launch/k8s.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    command = container["command"]
    assert command[0] == "torchrun"
    assert command[command.index("-m") + 1 :][:2] == ["vocab_parallel", "train"]
    assert f"--nnodes={job['spec']['completions']}" in command
    assert job["spec"]["parallelism"] == job["spec"]["completions"]
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in command
    # the address of rank 0 is a pod's name under the headless service
    assert pod["subdomain"] == service["metadata"]["name"]
    assert f"--master-addr={job['metadata']['name']}-0.{pod['subdomain']}" in command
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_torch_is_the_only_run_time_dependency(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    assert [distribution(requirement) for requirement in project["dependencies"]] == ["torch"]
    assert project["requires-python"] == ">=3.10"
    assert set(project["optional-dependencies"]) == EXTRAS


@pytest.mark.parametrize("name", LOCKS)
def test_lock_files_pin_every_requirement_exactly(name: str) -> None:
    lines = [line for line in lock_lines(name) if not line.startswith("-r ")]
    assert lines
    assert [line for line in lines if not PIN.fullmatch(line) and line not in UNPINNED] == []


def test_lock_files_cover_what_the_project_asks_for(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    run = {distribution(requirement) for requirement in [*project["dependencies"], *extras["train"]]}
    assert run <= locked("quickstart") | locked("data")
    assert {distribution(requirement) for requirement in extras["dev"]} <= locked("dev")
    # what --no-build-isolation builds the editable install with
    assert {distribution(requirement) for requirement in pyproject["build-system"]["requires"]} <= locked("quickstart")


def test_no_pin_is_given_twice_for_one_python() -> None:
    """A package pinned in two lock files, or twice without markers, is a conflict that pip refuses."""
    lines = [line for name in LOCKS for line in lock_lines(name) if not line.startswith("-r ")]
    everywhere = [line.partition("==")[0] for line in lines if " ; " not in line]
    assert len(everywhere) == len(set(everywhere))
    marked = {line.partition("==")[0].partition(" ; ")[0] for line in lines if " ; " in line}
    assert not marked & set(everywhere)


def test_python_sources_name_no_absolute_path() -> None:
    """Only the paths that every Linux system has may be named."""
    pattern = re.compile(r"""["'](/(?!dev/|proc/|bin/|sys/|etc/)[A-Za-z0-9_.-]+/[^"']*)["']""")
    found = {
        f"{path.relative_to(ROOT)}: {match.group(1)}"
        for folder in ("vocab_parallel", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for match in pattern.finditer(path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize("host", HOSTS)
def test_the_readme_shows_the_lines_that_the_hosts_tests_run(host: str) -> None:
    page = (ROOT / "docs" / "hosts" / f"{host}.md").read_text()
    block = page.split("<!-- three lines -->\n", 1)[1].split("```\n", 1)[0]
    assert block.startswith("```python\n") and block in (ROOT / "README.md").read_text()
    assert f"(hosts/{host}.md)" in (ROOT / "docs" / "hosts.md").read_text()


def test_the_readmes_file_tree_names_what_is_there() -> None:
    """Every path in it exists; every module and package at the top, every script and every folder of tests is in it."""
    tree = re.search(r"^```\n(vocab_parallel/\n.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    assert tree is not None
    named: set[str] = set()
    folder = ""
    for line in tree[1].splitlines():
        inside, indent = line.startswith("  "), len(line) - len(line.lstrip())
        if indent > 2:
            continue  # goes on with what is said of the paths above
        folder = folder if inside else line.split()[0]
        for word in itertools.takewhile(re.compile(r"\w+(/|\.py)|Dockerfile").fullmatch, line.split()):
            named.add((folder if inside else "") + word.rstrip("/"))
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
    package = [path for path in (ROOT / "vocab_parallel").iterdir() if path.suffix == ".py" or path.is_dir()]
    folders = [path for path in (ROOT / "tests").iterdir() if path.is_dir()]
    there = {str(path.relative_to(ROOT)) for path in [*package, *folders] if not path.name.startswith("__")}
    assert there <= named, there - named
    scripts = re.search(r"^scripts/ +(.*)$", tree[1], re.M)
    assert scripts is not None
    for script in (ROOT / "scripts").iterdir():
        assert re.search(rf"\b{re.escape(script.name)}\b", scripts[1]), script.name
