"""The tables of docs/wire.md name every field that a broker sends, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pool import Pool, echo

TEXT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()


def documented(caption: str) -> set[str]:
    """The names in the first column of the table below the line ``caption``."""
    table = TEXT.split(f"\n{caption}:\n\n", 1)[1].split("\n\n", 1)[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool({"echo": echo()}) as pool, pool.client() as client:
        client.infer("echo", {"x": np.ones((1, 4), np.float32)})
        yield pool


def test_fields_of_stats(pool: Pool) -> None:
    stats = pool.stats()
    model = stats["models"]["echo"]
    assert documented("`broker` of stats") == stats["broker"].keys()
    assert documented("A model in `models` of stats") == model.keys()
    assert documented("`last_batch` of a model") == model["last_batch"].keys()
    assert documented("One of `workers`") == model["workers"][0].keys()


def test_fields_of_slots(pool: Pool) -> None:
    assert documented("One of `slots`") == pool.control("slots", "echo")["slots"][0].keys()


def test_fields_of_metadata(pool: Pool) -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| metadata |"))
    promised = re.findall(r"`(\w+)`", row.split("|")[3].split(". While", 1)[0])
    assert set(promised) == pool.control("metadata", "echo").keys()
