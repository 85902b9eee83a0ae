"""Log lines in logfmt on stderr: one line for each record, whatever the message holds."""

from __future__ import annotations

import enum
import json
import logging
import sys
from datetime import datetime, timezone
from typing import TextIO


class LogLevel(str, enum.Enum):
    """What ``--log-level`` takes."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class LogfmtFormatter(logging.Formatter):
    """``ts=2030-01-01T00:00:00.000Z level=info logger=mxpool.broker message="worker ready worker=ocr-cpu-0"``."""

    def format(self, record: logging.LogRecord) -> str:
        """``record`` as one line; a traceback becomes one more value of it."""
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        fields = {
            "ts": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _quoted(record.getMessage()),
        }
        if record.exc_info:
            fields["exception"] = _quoted(self.formatException(record.exc_info))
        return " ".join(f"{key}={value}" for key, value in fields.items())


def _quoted(text: str) -> str:
    """In quotes, with every quote and control character escaped as in JSON."""
    return json.dumps(text, ensure_ascii=False)


def set_up(level: LogLevel, stream: TextIO | None = None) -> None:
    """Send the records of ``level`` and above to ``stream`` (stderr), in place of what was set up before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LogfmtFormatter())
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
