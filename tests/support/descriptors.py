"""What this process holds open, for tests that nothing leaks."""

from __future__ import annotations

import os
from pathlib import Path

from mxpool.broker import foreign_descriptors


def open_fds() -> set[str]:
    """The numbers of all open descriptors, without the one that looking opens."""
    return {path.name for path in list(Path("/proc/self/fd").iterdir()) if path.is_symlink()}


def wait_until_closed() -> None:
    """Return once all that the broker's code has given to ``foreign_descriptors`` so far is closed."""
    reader, writer = os.pipe()
    foreign_descriptors.close_later([writer])  # it closes in order
    os.read(reader, 1)
    os.close(reader)
