"""A test may be skipped only for what the machine lacks: a skip for any other reason fails the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

ALLOWED = ("gpu", "root", "interpreter")
_refused = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_refused] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    report = yield
    _judge(item.config, report)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    ...
