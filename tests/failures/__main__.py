"""`python -m tests.failures`: writes docs/failures.md."""

from __future__ import annotations

from tests.failures.page import PAGE, ROOT, render, rows

if __name__ == "__main__":
    found = rows()
    PAGE.write_text(render(found), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(found)} failures")
