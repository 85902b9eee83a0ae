"""How a process ended, in words."""

from __future__ import annotations

import signal

from mxpool.messages import EXIT_DEVICE_LOST

MEANINGS = {EXIT_DEVICE_LOST: "the device is lost"}  # of a worker's own exit codes, where the number tells nothing


def exit_words(code: int) -> str:
    """A return code of ``subprocess``: ``exit code 3``, or for a signal its name; real-time signals have a number."""
    if code >= 0:
        return f"exit code {code}" + (f" ({MEANINGS[code]})" if code in MEANINGS else "")
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
