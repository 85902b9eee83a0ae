from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from mxpool.client.arena import Arena

SIZE = 1 << 16


def test_arrays_lie_joined_at_the_offset_for_whoever_maps_the_descriptor() -> None:
    arena, fd = Arena.create(SIZE)
    flags = np.array([True, False, True])
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    strided = x[:, ::2]
    offsets = [arena.place([flags, x, strided], 3 + 48 + 24) for _ in range(2)]
    with mmap.mmap(fd, SIZE, prot=mmap.PROT_READ) as theirs:
        for offset in offsets:
            assert offset is not None
            assert theirs[offset : offset + 75] == flags.tobytes() + x.tobytes() + strided.tobytes()
    arena.close()
    os.close(fd)


def test_the_descriptor_can_be_neither_shrunk_nor_grown() -> None:
    arena, fd = Arena.create(SIZE)
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    arena.close()
    os.close(fd)


def test_a_full_arena_takes_nothing_until_a_region_is_given_back() -> None:
    arena, fd = Arena.create(SIZE)
    os.close(fd)  # the mapping does not need it
    whole = [np.zeros(SIZE, np.uint8)]
    assert arena.place(whole, SIZE) == 0
    assert arena.place([np.zeros(1, np.uint8)], 1) is None
    arena.give(0)
    assert arena.place(whole, SIZE) == 0
    arena.close()
