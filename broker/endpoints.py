"""Where clients connect: sockets bound safely, one broker a path, nothing of another program's touched."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import socket
import stat
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from mxpool.errors import EndpointInUse
from mxpool.shm.link import link_path, listen

log = logging.getLogger(__name__)

SOCKET_UMASK = 0o117  # sockets get mode 0660: owner and group may connect
DIRECTORY_MODE = 0o750
RESERVED_FDS = 64  # the broker's own: epoll, eventfds, libzmq's, log and model files
FDS_PER_WORKER = 5
FDS_PER_CLIENT = 4  # its ZMQ connection, its link and two arenas


class Endpoint:
    """One bound address. An ipc path is guarded by a lock file, since a ZMQ bind would take it from a live broker."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.listener: socket.socket | None = None
        self._lock_fd = -1
        self._link_path = link_path(address)

    def bind(self, router: zmq.Socket[bytes], heartbeat_s: float) -> None:
        """Bind the ROUTER, and listen for links beside an ipc path.

        Raises:
            EndpointInUse: another broker, or something that is not a socket, is there; nothing was changed.
        """
        path = self._link_path
        if path is None:
            router.set(zmq.HEARTBEAT_IVL, int(heartbeat_s * 1000))
            router.set(zmq.HEARTBEAT_TIMEOUT, int(heartbeat_s * 1000))  # libzmq's I/O thread answers, however busy
            self._bind(router)
            router.set(zmq.HEARTBEAT_IVL, 0)
            return
        self._take(Path(self.address[6:]), path)
        umask = os.umask(SOCKET_UMASK)
        try:
            self.listener = listen(path)
            self._bind(router)
        except OSError as error:
            raise EndpointInUse(path=str(path), reason=error.strerror or str(error)) from None
        finally:
            os.umask(umask)

    def _bind(self, router: zmq.Socket[bytes]) -> None:
        try:
            router.bind(self.address)
        except zmq.ZMQError as error:
            raise EndpointInUse(path=self.address, reason=error.strerror or str(error)) from None
        self.address = router.get_string(zmq.LAST_ENDPOINT)

    def _take(self, path: Path, link: Path) -> None:
        """Hold the lock of ``path`` and clear away the sockets of a broker that is gone."""
        try:
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            self._lock_fd = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EndpointInUse(path=str(path), reason=error.strerror or str(error)) from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._unlock()
            raise EndpointInUse(path=str(path), reason="another broker serves there") from None
        for found in (path, link):
            try:
                mode = found.lstat().st_mode
            except FileNotFoundError:
                continue
            if not stat.S_ISSOCK(mode):
                self._unlock()
                raise EndpointInUse(path=str(found), reason="it is not a socket, and was not touched")
        for found in (path, link):
            found.unlink(missing_ok=True)

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def close(self) -> None:
        """Stop listening and remove what ``bind`` made. The lock goes last."""
        if self.listener is not None:
            self.listener.close()
        if self._link_path is not None and self._lock_fd >= 0:
            path = Path(self.address[6:])
            for found in (path, self._link_path, Path(f"{path}.lock")):
                found.unlink(missing_ok=True)
        self._unlock()


def connections_max(max_clients: int, workers: int) -> int:
    """How many clients the descriptors allow, at most ``max_clients``; raises the soft limit to the hard one first."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    allowed = max((hard - RESERVED_FDS - workers * FDS_PER_WORKER) // FDS_PER_CLIENT, 1)
    if allowed < max_clients:
        log.warning("clients limited clients=%d by=RLIMIT_NOFILE nofile=%d", allowed, hard)
    return min(allowed, max_clients)


class Door:
    """Counts the ROUTER's connections, links or no links."""

    def __init__(self, router: zmq.Socket[bytes]) -> None:
        self.connections = 0
        self._router = router
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def fileno(self) -> int:
        """The descriptor that says that connections came or went."""
        return int(self._monitor.fileno())

    def watch(self) -> None:
        """Take note of connections that came or went."""
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            self.connections += 1 if event == zmq.EVENT_ACCEPTED else -1

    def close(self) -> None:
        """Stop watching."""
        self._router.disable_monitor()
        self._monitor.close(0)  # disabling only forgets it, and an open socket keeps the context from ending
