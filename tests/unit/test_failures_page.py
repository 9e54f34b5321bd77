"""docs/failures.md: every failure once, the page as generated, each test one that pytest runs."""

from __future__ import annotations

import re

import pytest

from tests.failures import page
from tests.failures.lab import COUNT, Failure, failure


def test_every_failure_has_exactly_one_test():
    assert [row.failure.number for row in page.rows()] == list(range(1, COUNT + 1))


def test_the_page_is_what_the_tests_say():
    assert page.PAGE.read_text(encoding="utf-8") == page.render(page.rows()), "run: python -m tests.failures"


def test_every_failure_is_in_a_section():
    assert [number for _, numbers in page.SECTIONS for number in numbers] == list(range(1, COUNT + 1))


def test_every_test_on_the_page_is_in_its_file_and_collected(request):
    text = page.PAGE.read_text(encoding="utf-8")
    named = re.findall(r"^\| \d+ \|.*\[`(\w+)`\]\(\.\./(\S+)\) \|$", text, re.M)
    assert len(named) == COUNT
    for path in page.files():
        module = pytest.Module.from_parent(request.session, path=path)
        collected = {item.originalname for item in module.collect()}
        here = {test for test, file in named if page.ROOT / file == path}
        assert here and here <= collected, f"{path.name}: {here - collected} not collected"
    assert {page.ROOT / file for _, file in named} == set(page.files())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ((0, "a", "shown", "b."), "numbers 1 to 66"),
        ((67, "a", "shown", "b."), "numbers 1 to 66"),
        ((1, "a", "the user should know", "b."), "the answer is one of"),
        ((1, "a.", "shown", "b."), "full stop"),
        ((1, "a", "shown", "b"), "full stop"),
    ],
)
def test_a_mark_that_the_page_cannot_show_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        failure(*wrong)


def test_a_mark_leaves_the_test_as_it_is():
    def test_something():
        pass

    marked = failure(3, "A mistake", "shown", "A sentence.")(test_something)
    assert marked is test_something and marked.failure == Failure(3, "A mistake", "shown", "A sentence.")
