from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from descriptors import open_fds

from mxpool.errors import SharedMemoryShort
from mxpool.shm.segment import SHM_DIRECTORY, Segment

SIZE = 3 * 4096


def names() -> set[str]:
    return {path.name for path in Path(SHM_DIRECTORY).iterdir() if path.name.startswith("mxpool")}


def test_a_segment_is_zero_mapped_reserved_and_has_no_name() -> None:
    before = names()
    segment = Segment.create(SIZE)
    try:
        assert names() == before
        assert segment.map[:] == bytes(SIZE)
        status = os.fstat(segment.fd)
        assert (status.st_size, status.st_blocks * 512, status.st_nlink) == (SIZE, SIZE, 0)
    finally:
        segment.close()
    assert names() == before


def test_a_second_mapping_of_the_descriptor_is_the_same_memory() -> None:
    segment = Segment.create(SIZE)
    other = Segment(os.dup(segment.fd), SIZE)
    try:
        segment.map[5000:5003] = b"abc"
        assert other.map[5000:5003] == b"abc"
        segment.close()
        assert other.map[5000:5003] == b"abc"
    finally:
        other.close()
        segment.close()


def test_closing_gives_the_descriptor_back_once() -> None:
    before = open_fds()
    segment = Segment.create(SIZE)
    segment.close()
    assert segment.fd == -1
    segment.close()
    assert open_fds() == before


def test_a_view_that_outlives_the_segment_keeps_its_pages() -> None:
    segment = Segment.create(SIZE)
    view = np.frombuffer(segment.map, np.uint8)
    view[:] = 9
    segment.close()
    assert int(view.sum()) == 9 * SIZE
    assert view[-1] == 9


def test_more_than_there_is_is_refused_with_both_figures_and_leaves_nothing() -> None:
    room = os.statvfs(SHM_DIRECTORY)
    too_much = (room.f_blocks + 1) * room.f_frsize
    before = (names(), open_fds())
    with pytest.raises(SharedMemoryShort) as caught:
        Segment.create(too_much)
    assert caught.value.fields["needed_bytes"] == too_much
    assert 0 < caught.value.fields["free_bytes"] < too_much
    assert "--shm-size" in caught.value.message
    assert (names(), open_fds()) == before


def test_a_size_that_cannot_be_allocated_leaves_no_name_and_no_descriptor() -> None:
    before = (names(), open_fds())
    with pytest.raises(OSError, match="Invalid argument"):
        Segment.create(0)
    assert (names(), open_fds()) == before
