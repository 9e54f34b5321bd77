"""Writes docs/api/, every public name with its signature and docstring, from the source: `python -m tests.api_page`.

Nothing is imported: the page is the same with or without the host frameworks.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "api"
PACKAGES = (
    "vocab_parallel",
    "vocab_parallel.loss",
    "vocab_parallel.select",
    "vocab_parallel.decode",
    "vocab_parallel.vocabulary",
    "vocab_parallel.vocabulary.manifest",
    "vocab_parallel.vocabulary.migration",
    "vocab_parallel.checkpoint",
    "vocab_parallel.checkpoint.exchange",
    "vocab_parallel.checkpoint.migration",
    "vocab_parallel.checkpoint.release",
    "vocab_parallel.integrations.megatron",
    "vocab_parallel.integrations.deepspeed",
    "vocab_parallel.integrations.transformers",
    "vocab_parallel.integrations.fsdp",
)
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Collectives", "Memory", "Source", "Example")
HEAD = """# Public names

Every name that a package exports, with its signature and docstring: one page a package. A name that several packages
export is described on the first one's page. These pages are generated from the source by `scripts/docs`.
"""

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Found(NamedTuple):
    """Where a public name is defined."""

    path: Path
    node: Definition


def pages() -> dict[Path, str]:
    """The text of every page, the index first."""
    index, texts = [HEAD], {}
    described: dict[Found, str] = {}
    for package in PACKAGES:
        about, page = first_line(module(path_of(package))), f"{package.removeprefix('vocab_parallel.')}.md"
        index.append(f"\n## {package}\n\n{about}\n\n")
        parts = [f"# {package}\n\n{about}\n"]
        for name in exported(package):
            found = find(package, name)
            if found not in described:
                described[found] = page
                parts.append(entry(name, found))
            index.append(f"- [`{name}`]({described[found]}#{name.lower()}): {summary(found)}\n")
        if len(parts) > 1:
            texts[FOLDER / page] = "".join(parts)
    return {FOLDER / "README.md": "".join(index)} | texts


def summary(found: Found) -> str:
    if isinstance(found.node, ast.FunctionDef | ast.ClassDef):
        return (ast.get_docstring(found.node) or "").split("\n")[0]
    return f"`{lines(found.path, found.node.lineno, found.node.lineno)}`"


def exported(package: str) -> list[str]:
    """`__all__` of a package."""
    for node in module(path_of(package)).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{package} has no __all__")


def find(package: str, name: str) -> Found:
    """Follows the imports from a package to the definition of one of its names."""
    path = path_of(package)
    for node in module(path).body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.startswith("vocab_parallel"):
                    return find(node.module, alias.name)
        elif name in defined(node):
            return Found(path, node)  # type: ignore[arg-type]
    raise AssertionError(f"{package}.{name} is exported, but not defined")


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


@functools.cache
def module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def path_of(name: str) -> Path:
    place = ROOT.joinpath(*name.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def entry(name: str, found: Found) -> str:
    place = found.path.relative_to(ROOT).as_posix()
    text = f"\n## {name}\n\n[`{place}`](../../{place})\n\n```python\n{signature(found)}\n```\n"
    if isinstance(found.node, ast.FunctionDef | ast.ClassDef):
        text += markdown(ast.get_docstring(found.node) or "")
    if isinstance(found.node, ast.ClassDef):
        text += "".join(method(found.path, node) for node in methods(found.node))
    return text


def methods(node: ast.ClassDef) -> list[ast.FunctionDef]:
    """Those that a user calls: public, documented, not a property's second half."""
    return [
        one
        for one in node.body
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_") and ast.get_docstring(one)
    ]


def method(path: Path, node: ast.FunctionDef) -> str:
    kinds = [ast.unparse(one) for one in node.decorator_list]
    mark = next((f"@{kind}\n" for kind in kinds if kind in ("property", "classmethod", "staticmethod")), "")
    return f"\n```python\n{mark}{header(path, node)}\n```\n{markdown(ast.get_docstring(node) or '')}"


def signature(found: Found) -> str:
    """A function to the end of its parameters with their comments; a class with its fields and `__init__`."""
    node = found.node
    if isinstance(node, ast.FunctionDef):
        return header(found.path, node)
    if not isinstance(node, ast.ClassDef):
        text = lines(found.path, node.lineno, node.end_lineno or node.lineno)
        return text if text.count("\n") < 12 else text.split("\n")[0] + " ..."
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    parts = [f"class {node.name}({bases})" if bases else f"class {node.name}"]
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_"):
            parts.append(lines(found.path, one.lineno, one.end_lineno or one.lineno))
        elif isinstance(one, ast.FunctionDef) and one.name == "__init__":
            parts.append("\n".join("    " + line for line in header(found.path, one).split("\n")))
    return "\n".join(parts)


def header(path: Path, node: ast.FunctionDef) -> str:
    """The source from `def` to the colon before the body."""
    text = lines(path, node.lineno, node.body[0].lineno - 1) or lines(path, node.lineno, node.lineno)
    return inspect.cleandoc(text).rstrip().removesuffix(":")


def lines(path: Path, first: int, last: int) -> str:
    return "\n".join(path.read_text(encoding="utf-8").split("\n")[first - 1 : last])


def first_line(node: ast.Module) -> str:
    return (ast.get_docstring(node) or "").split("\n")[0]


def markdown(docstring: str) -> str:
    """Google's sections as bold words, their entries as lists, what follows `::` as code."""
    text, entries, code = [], False, False
    for line in docstring.split("\n"):
        head, _, rest = line.partition(":")
        if code:
            if line and not line.startswith(" "):
                text[-1:] = ["```", ""]  # in the place of the empty line before
                code = False
            else:
                if line or text[-1] != "```python":
                    text.append(line.removeprefix("    "))
                continue
        if line.endswith("::"):
            text += [line.strip()[:-1], "", "```python"]
            code = True
        elif head in SECTIONS and not line.startswith(" "):
            entries = head in ("Args", "Attributes", "Raises") and not rest
            text.append(f"**{head}**{':' + rest if rest else ''}" + ("" if rest else "\n"))
        elif entries and (one := re.match(r"    ([^\s:][^:]*): ?(.*)", line)):
            text.append(f"- `{one[1]}`: {one[2]}")
        else:
            entries = entries and line[:1] in ("", " ")
            text.append(f"  {line.strip()}" if entries and line else line.strip())
    return "\n" + "\n".join(text + ["```"] * code).rstrip() + "\n" if docstring else ""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    texts = pages()
    for old in set(FOLDER.glob("*.md")) - set(texts):
        old.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    print(f"{FOLDER.relative_to(ROOT)}: {len(texts)} pages")


if __name__ == "__main__":
    main()
