"""Ends the process when its broker is gone, also while a batch or a load holds the main thread."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
import time

from mxpool.shm.link import Link

PR_SET_PDEATHSIG = 1  # linux/prctl.h
GRACE_S = 0.7  # of the second within which a worker is gone, so that a slow machine keeps it too


def end_with(link: Link, exit_code: int) -> None:
    """Start a thread that sleeps until the peer of ``link`` is gone, and ends the process ``GRACE_S`` later.

    The main thread sees the same end of the link and normally exits by itself before that. A parent-death signal was
    rejected: it comes when the *thread* that spawned the worker ends, and not at all to a worker of systemd.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # one that was stopped wakes up, and sees the end
    fd = os.dup(link.fileno())  # ours until the process ends, so that no other file takes its number
    threading.Thread(target=_wait_and_end, args=(fd, exit_code), name="broker-watch", daemon=True).start()


def _wait_and_end(fd: int, exit_code: int) -> None:
    gone = select.poll()
    gone.register(fd, select.POLLRDHUP)
    gone.poll()
    time.sleep(GRACE_S)
    os._exit(exit_code)
