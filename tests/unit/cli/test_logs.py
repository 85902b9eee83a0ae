from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool.cli import logs

LINE = re.compile(r'ts=\S+Z level=(\w+) logger=(\S+) message=("(?:[^"\\]|\\.)*")(?: exception=("(?:[^"\\]|\\.)*"))?')


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@given(message=st.text())
def test_a_record_is_one_line_that_reads_back_whatever_the_message_holds(message: str) -> None:
    record = logging.LogRecord("mxpool.broker", logging.WARNING, "", 0, "%s", (message,), None)
    found = LINE.fullmatch(logs.LogfmtFormatter().format(record))
    assert found is not None
    assert (found[1], found[2], json.loads(found[3])) == ("warning", "mxpool.broker", message)


def test_a_traceback_stays_in_the_line_of_its_record() -> None:
    stream = StringIO()
    logs.set_up(logs.LogLevel.info, stream)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("mxpool.worker").exception("it failed worker=%s", "a-cpu-0")
    (line,) = stream.getvalue().splitlines()
    found = LINE.fullmatch(line)
    assert found is not None
    assert json.loads(found[3]) == "it failed worker=a-cpu-0"
    assert "ValueError: two\nlines" in json.loads(found[4])


def test_records_below_the_level_are_dropped_and_setting_up_twice_does_not_double_lines() -> None:
    stream = StringIO()
    logs.set_up(logs.LogLevel.debug, stream)
    logs.set_up(logs.LogLevel.info, stream)
    logging.getLogger("mxpool").debug("unseen")
    logging.getLogger("mxpool").info("seen")
    assert stream.getvalue().count("\n") == 1
