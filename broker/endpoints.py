"""Where clients connect: sockets bound safely, one broker a path, nothing of another program's touched."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import socket
import stat
from collections.abc import Sequence
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
SPARE_PART, SPARE_FDS_MAX = 4, 1024  # a quarter, up to 1,024: what may come in before the door is shut
SHUT_SUFFIX = ".shut"


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
            while not self._lock(f"{path}.lock"):
                pass
        except BlockingIOError:
            raise EndpointInUse(path=str(path), reason="another broker serves there") from None
        except OSError as error:
            raise EndpointInUse(path=str(path), reason=error.strerror or str(error)) from None
        for found in (path, link):
            try:
                mode = found.lstat().st_mode
            except FileNotFoundError:
                continue
            if not stat.S_ISSOCK(mode):
                self._unlock()
                raise EndpointInUse(path=str(found), reason="it is not a socket, and was not touched")
        for found in (path, link, Path(f"{path}{SHUT_SUFFIX}")):
            found.unlink(missing_ok=True)

    def _lock(self, path: str) -> bool:
        """Take the lock; False if its last holder removed the file before that: nobody else would see it."""
        self._lock_fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._lock_fd).st_nlink:
                return True
        except OSError:
            self._unlock()
            raise
        self._unlock()
        return False

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def shut(self) -> None:
        """Let no new ZMQ connection in on an ipc path. Those that are there stay, which an unbind would end."""
        self._rename("", SHUT_SUFFIX)

    def reopen(self) -> None:
        """Undo ``shut``."""
        self._rename(SHUT_SUFFIX, "")

    def _rename(self, before: str, after: str) -> None:
        if self._link_path is not None:
            with contextlib.suppress(FileNotFoundError):  # somebody removed it: nobody comes in anyway
                Path(f"{self.address[6:]}{before}").rename(f"{self.address[6:]}{after}")

    def close(self) -> None:
        """Stop listening and remove what ``bind`` made, once the ROUTER is closed. The lock goes last."""
        if self.listener is not None:
            self.listener.close()
        if self._link_path is not None and self._lock_fd >= 0:
            path = Path(self.address[6:])
            for found in (path, Path(f"{path}{SHUT_SUFFIX}"), self._link_path, Path(f"{path}.lock")):
                found.unlink(missing_ok=True)
        self._unlock()


def _client_fds(workers: int) -> int:
    """Descriptors for clients, of all that this process may have; raises the soft limit to the hard one first."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    left = hard - RESERVED_FDS - workers * FDS_PER_WORKER
    return left - min(left // SPARE_PART, SPARE_FDS_MAX)


def clients_max(max_clients: int, workers: int) -> int:
    """How many clients the descriptors allow, at most ``max_clients``."""
    allowed = max(_client_fds(workers) // FDS_PER_CLIENT, 1)
    if allowed < max_clients:
        nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        log.warning("clients limited clients=%d by=RLIMIT_NOFILE nofile=%d", allowed, nofile)
    return min(allowed, max_clients)


def connections_max(clients: int, workers: int) -> int:
    """How many ZMQ connections the descriptors allow beside the links and arenas of ``clients``."""
    return max(_client_fds(workers) - clients * (FDS_PER_CLIENT - 1), clients)


class Door:
    """Counts the ROUTER's connections, links or no links, and shuts ``endpoints`` to more than ``limit`` of them.

    libzmq 4.3 aborts the process if it cannot accept on ipc for want of a descriptor, so it must not come to that.
    """

    def __init__(self, router: zmq.Socket[bytes], endpoints: Sequence[Endpoint], limit: int) -> None:
        self.connections = 0
        self.is_shut = False
        self._router = router
        self._endpoints = endpoints
        self._limit = limit
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def fileno(self) -> int:
        """The descriptor that says that connections came or went."""
        return int(self._monitor.fileno())

    def watch(self) -> None:
        """Take note of connections that came or went."""
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            self.connections += 1 if event == zmq.EVENT_ACCEPTED else -1
            if self.connections >= self._limit and not self.is_shut:
                self._shut()
        if self.is_shut and self.connections < self._limit - self._limit // 10:
            self._reopen()

    def _shut(self) -> None:
        self.is_shut = True
        for endpoint in self._endpoints:
            endpoint.shut()
        log.warning("no more connections accepted connections=%d by=RLIMIT_NOFILE", self.connections)

    def _reopen(self) -> None:
        self.is_shut = False
        for endpoint in self._endpoints:
            endpoint.reopen()
        log.info("connections accepted again connections=%d", self.connections)

    def close(self) -> None:
        """Stop watching."""
        self._router.disable_monitor()
        self._monitor.close(0)  # disabling only forgets it, and an open socket keeps the context from ending
