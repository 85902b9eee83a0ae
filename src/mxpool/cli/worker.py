"""mx-worker: one worker process. The broker starts it with a link; it is not meant to be run by hand."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence

from mxpool.cli import logs

UNASKED_THREADS = (
    "OPENBLAS_NUM_THREADS",  # numpy's BLAS starts a thread for each CPU on import; no worker uses it
    "ORT_DISABLE_TELEMETRY",  # onnxruntime 1.32 reports usage to its vendor, from a thread that it starts on import
)


def _inherited(text: str) -> socket.socket:
    """The socket at descriptor ``text``, no longer inheritable: what a runtime spawns must not hold the link open."""
    try:
        connection = socket.socket(fileno=int(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not a link: {error}") from None
    if (connection.family, connection.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        raise argparse.ArgumentTypeError(f"{text} is not a link: it is not an AF_UNIX SEQPACKET socket")
    connection.set_inheritable(False)
    return connection


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    # argparse: a worker's start is part of every restart, and richer command lines take longer to import.
    parser = argparse.ArgumentParser(prog="mx-worker", description="Serve one model to the broker that started it.")
    parser.add_argument(
        "--link-fd", dest="link", type=_inherited, required=True, metavar="N", help="inherited AF_UNIX SEQPACKET socket"
    )
    parser.add_argument("--log-level", default="info", choices=[level.value for level in logs.LogLevel])
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a worker and exit with its code: 0 stopped, 70 sick, 71 device lost, 78 cannot boot, 2 bad arguments."""
    arguments = _arguments(argv)
    # The broker decides when a worker ends; a Ctrl-C at the terminal must not take workers before their requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logs.set_up(logs.LogLevel(arguments.log_level))
    for variable in UNASKED_THREADS:
        os.environ.setdefault(variable, "1")
    from mxpool.shm.link import Link  # noqa: PLC0415
    from mxpool.workers import process, watch  # noqa: PLC0415

    link = Link(arguments.link)
    watch.end_with(link, process.EXIT_STOPPED)
    code = process.run_worker(link, os.environ)
    if code != process.EXIT_STOPPED:
        sys.stderr.flush()
        os._exit(code)  # what was not unloaded is not taken down: destructors of a sick runtime hang or crash
    sys.exit(code)


if __name__ == "__main__":
    main()
