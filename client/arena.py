"""Memory that this client shares with its broker, so that large bodies are copied once on our side and not sent."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from mxpool.client.arrays import Array
from mxpool.client.regions import Regions

ARENA_BYTES = 64 * 1024 * 1024
ARENA_MIN_BYTES = 16_384  # below it a message is as fast; measured: docs/bench/arena.md

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """A sealed memfd, mapped, and which of its regions are in use. It belongs to one connection.

    The seals promise the broker that a mapping of it never faults. ``token`` is the broker's name for it.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map ``fd``, which stays the caller's; ``create`` makes both."""
        self.size_bytes = size_bytes
        self.token = b""
        self._map = mmap.mmap(fd, size_bytes)
        self._regions = Regions(size_bytes)

    @classmethod
    def create(cls, size_bytes: int = ARENA_BYTES) -> tuple[Arena, int]:
        """A new arena and its descriptor, which the caller sends and closes: the mapping does not need it.

        Pages are taken from memory as they are first written. OSError if the kernel refuses one of the steps.
        """
        fd = os.memfd_create("mxpool-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd, size_bytes), fd
        except OSError:
            os.close(fd)
            raise

    def place(self, arrays: list[Array], size_bytes: int) -> int | None:
        """Copy the arrays, joined and C-contiguous, into a free region of ``size_bytes``; its offset, or None if full.

        The region is in use until ``give``.
        """
        offset = self._regions.take(size_bytes)
        if offset is None:
            return None
        at = offset
        for array in arrays:
            view: Array = np.ndarray(array.shape, array.dtype, self._map, at)
            np.copyto(view, array)
            at += array.nbytes
        return offset

    def give(self, offset: int) -> None:
        """Free a region: the broker has given the final answer for the request that used it."""
        self._regions.give(offset)

    def close(self) -> None:
        """Unmap. The broker's own mapping lives on until it lets go; nothing of ours refers to it any more."""
        self._map.close()
