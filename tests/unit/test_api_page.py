"""docs/api/ is what the source says now."""

from __future__ import annotations

import pytest

from tests import api_page


def test_the_pages_are_those_that_the_source_gives():
    pages = api_page.pages()
    assert set(api_page.FOLDER.glob("*.md")) == set(pages)
    stale = [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, f"{stale} are not what the source says: run scripts/docs"


@pytest.mark.parametrize("package", api_page.PACKAGES)
def test_every_public_name_is_defined_and_says_what_it_is(package):
    for name in api_page.exported(package):
        assert api_page.summary(api_page.find(package, name)), f"{name} has no docstring"


def test_a_docstring_becomes_lists_and_code():
    code = "Like::\n\n    a = 1\n\n    b = 2\n\n"
    text = api_page.markdown(f"What.\n\n{code}Args:\n    x: One\n        more.\n\nReturns:\n    It.")
    assert text == (
        "\nWhat.\n\nLike:\n\n```python\na = 1\n\nb = 2\n```\n\n**Args**\n\n- `x`: One\n  more.\n\n**Returns**\n\nIt.\n"
    )
