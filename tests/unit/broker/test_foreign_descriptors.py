from __future__ import annotations

import os
import socket
import struct
import time

from descriptors import open_fds, wait_until_closed

from mxpool.broker.foreign_descriptors import close_later


def lingering() -> tuple[int, list[socket.socket]]:
    """A descriptor whose last close takes 1 s, and the sockets that keep it so."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    reader, _ = listener.accept()
    sender.setblocking(False)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1))
    while True:
        try:
            sender.send(bytes(1 << 16))
        except BlockingIOError:
            break
    sender.setblocking(True)
    return sender.detach(), [listener, reader]


def test_a_descriptor_that_takes_long_to_close_holds_nobody_up() -> None:
    fd, held = lingering()
    begin = time.monotonic()
    close_later([fd])
    took_s = time.monotonic() - begin
    wait_until_closed()
    assert time.monotonic() - begin > 0.5  # it was a slow one indeed
    assert took_s < 0.4
    for connection in held:
        connection.close()


def test_everything_is_closed_and_minus_one_is_nothing() -> None:
    before = open_fds()
    close_later([*os.pipe(), -1])
    close_later([])
    wait_until_closed()
    assert open_fds() == before
