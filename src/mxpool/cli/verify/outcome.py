"""What a check found: one row of the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any


class Result(str, Enum):
    """``note``: nothing is wrong, but it should be read. ``skipped``: there was nothing to check."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row: which check, what was compared with what, the result, and more in words and figures."""

    check: str
    compared: str
    result: Result
    detail: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As ``--json`` has it."""
        return {**asdict(self), "result": self.result.value}


def all_passed(outcomes: Iterable[Outcome]) -> bool:
    """True if none failed."""
    return not any(outcome.result is Result.FAILED for outcome in outcomes)
