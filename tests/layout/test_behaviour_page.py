"""docs/behaviour.md names a test for each hazard: they are there, and the page has no line without one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "behaviour.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
ROWS = [line for line in PAGE.splitlines() if "::" in line or re.match(r"\| ([A-Z]\d+|  *\| [^h-])", line)]


def test_every_line_of_the_tables_names_one_test() -> None:
    assert len(ROWS) > 40
    for row in ROWS:
        assert len(NAMED.findall(row)) == 1, row


@pytest.mark.parametrize(("file", "test"), sorted(set(NAMED.findall(PAGE))))
def test_every_test_that_is_named_is_there(file: str, test: str) -> None:
    path = ROOT / file if "/" in file else ROOT / "tests" / "process" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
