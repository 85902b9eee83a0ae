"""A test may be skipped only for what the machine lacks; a skip for any other reason fails the run.

No example of hypothesis has a deadline: on a busy machine any of them may take long once.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import settings

ALLOWED = re.compile(r"Skipped: (gpu|root|interpreter)\b")  # the markers of setup.cfg; a reason begins with one
settings.register_profile("mxpool", deadline=None)
settings.load_profile("mxpool")


class SkipReasons:
    """Watches the skips of one run."""

    def __init__(self) -> None:
        self.refused: list[str] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._judge(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._judge(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.refused and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.refused:
            terminalreporter.write_line(f"skipped for no allowed reason (gpu, root, interpreter): {line}", red=True)

    def _judge(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not ALLOWED.match(reason):
            self.refused.append(f"{report.nodeid}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SkipReasons(), "mxpool-skip-reasons")
