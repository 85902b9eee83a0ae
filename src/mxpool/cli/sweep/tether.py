"""Children of a sweep that end with it, however it ends: ``python -m mxpool.cli.sweep.tether PARENT PROGRAM ARGS``.

They have a session of their own, so that Ctrl-C at the terminal reaches the sweep alone, which ends them in order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

PR_SET_PDEATHSIG = 1  # prctl(2)


def start(
    program: str, arguments: Sequence[str], *, log: IO[bytes], environ: Mapping[str, str], piped: bool = False
) -> subprocess.Popen[bytes]:
    """Start ``broker`` or ``client`` with stderr to ``log``; ``piped``: with pipes to its stdin and stdout.

    The calling thread must live as long as the child is to.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "mxpool.cli.sweep.tether", str(os.getpid()), program, *arguments],
        stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
        stdout=subprocess.PIPE if piped else log,
        stderr=log,
        env={**environ, "PYTHONSAFEPATH": "1"},  # a numpy.py in the working directory is not numpy
        start_new_session=True,
        bufsize=0,
    )


def _tie_to(parent: int) -> None:
    """Have the kernel send SIGTERM when ``parent`` ends; end at once if it has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Become the program."""
    parent, program, *arguments = sys.argv[1:]
    _tie_to(int(parent))
    sys.argv = [program, *arguments]
    if program == "broker":
        from mxpool.cli import broker  # noqa: PLC0415

        broker.main()
    else:
        from mxpool.cli.sweep import client_process  # noqa: PLC0415

        client_process.main()


if __name__ == "__main__":
    main()
