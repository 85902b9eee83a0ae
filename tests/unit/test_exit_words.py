from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from mxpool.exits import exit_words


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit code 0"), (70, "exit code 70"), (-9, "SIGKILL"), (-40, "signal 40"), (-signal.SIGRTMIN, "SIGRTMIN")],
)
def test_an_end_is_told_in_words(code: int, words: str) -> None:
    assert exit_words(code) == words


def test_the_code_of_a_process_that_a_real_time_signal_ended_has_words() -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 40)"], check=False, timeout=60)
    assert exit_words(ended.returncode) == "signal 40"
