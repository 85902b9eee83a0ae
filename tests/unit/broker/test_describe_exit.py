from __future__ import annotations

from collections import deque

import pytest

from mxpool.broker.worker_process import describe_exit


@pytest.mark.parametrize(
    ("code", "stderr", "words"),
    [
        (3, [], "exit code 3"),
        (-9, [], "killed by SIGKILL"),
        (-40, [], "killed by signal 40"),
        (-9, ["ts=1 level=info logger=a message=ready"], "killed by SIGKILL"),
        (
            70,
            ["ts=1 level=error message=sick", "ts=2 level=info message=x"],
            "exit code 70: ts=1 level=error message=sick",
        ),
        (71, [], "exit code 71 (the device is lost)"),
        (-6, ["first", "free(): invalid size"], "killed by SIGABRT: free(): invalid size"),
    ],
)
def test_a_workers_end_is_told_with_the_last_line_that_it_wrote(code: int, stderr: list[str], words: str) -> None:
    assert describe_exit(code, deque(stderr)) == words
