from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from descriptors import open_fds

from mxpool.broker.endpoints import FDS_PER_CLIENT, Door, Endpoint, clients_max, connections_max
from mxpool.errors import EndpointInUse
from mxpool.shm.link import Link

WAIT_MS = 5000
Router = Callable[[], "zmq.Socket[bytes]"]


@pytest.fixture
def router() -> Iterator[Router]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def make() -> zmq.Socket[bytes]:
        made.append(context.socket(zmq.ROUTER))
        made[-1].linger = 0
        return made[-1]

    yield make
    for one in made:
        one.close(0)
    context.term()


def bound(path: Path, socket_made: zmq.Socket[bytes]) -> Endpoint:
    endpoint = Endpoint(f"ipc://{path}")
    endpoint.bind(socket_made, 10)
    return endpoint


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in ``folder`` but the lock: kind and content, a link's target as its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        content = str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        if path.suffix != ".lock":
            found[str(path)] = (stat.S_IFMT(mode), content)
    return found


def test_a_bound_endpoint_has_two_sockets_that_owner_and_group_may_use(tmp_path: Path, router: Router) -> None:
    path = tmp_path / "run" / "broker.sock"
    umask = os.umask(0o022)
    os.umask(umask)
    endpoint = bound(path, router())
    for found in (path, Path(f"{path}.link")):
        mode = found.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o660
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
    assert endpoint.listener is not None
    client = Link.connect(f"{path}.link")
    endpoint.listener.accept()[0].close()
    client.close()
    assert os.umask(umask) == umask
    endpoint.close()
    assert list(path.parent.iterdir()) == []


def test_a_second_broker_is_refused_and_the_first_goes_on(tmp_path: Path, router: Router) -> None:
    path = tmp_path / "broker.sock"
    first = bound(path, router())
    before = (path.stat().st_ino, Path(f"{path}.link").stat().st_ino)
    with pytest.raises(EndpointInUse, match="another broker serves there"):
        bound(path, router())
    assert (path.stat().st_ino, Path(f"{path}.link").stat().st_ino) == before
    Link.connect(f"{path}.link").close()
    first.close()
    again = bound(path, router())
    again.close()


def test_closing_one_that_was_refused_takes_nothing_from_the_one_that_serves(tmp_path: Path, router: Router) -> None:
    path = tmp_path / "broker.sock"
    first = bound(path, router())
    refused = Endpoint(f"ipc://{path}")
    with pytest.raises(EndpointInUse):
        refused.bind(router(), 10)
    refused.close()
    assert path.exists()
    assert Path(f"{path}.link").exists()
    with pytest.raises(EndpointInUse, match="another broker"):
        bound(path, router())
    first.close()


def test_sockets_of_a_broker_that_is_gone_are_replaced(tmp_path: Path, router: Router) -> None:
    path = tmp_path / "broker.sock"
    for name in (path, f"{path}.link"):
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(name))
        left.close()
    Path(f"{path}.lock").write_text("")
    endpoint = bound(path, router())
    Link.connect(f"{path}.link").close()
    endpoint.close()


@pytest.mark.parametrize("where", ["broker.sock", "broker.sock.link"])
@pytest.mark.parametrize("kind", ["text", "directory", "link to a file", "dangling link", "fifo"])
def test_what_is_not_a_socket_is_named_and_not_touched(tmp_path: Path, router: Router, where: str, kind: str) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    found = folder / where
    if kind == "text":
        found.write_text("mine")
    elif kind == "directory":
        found.mkdir()
    elif kind == "fifo":
        os.mkfifo(found)
    else:
        found.symlink_to(elsewhere / ("precious" if kind == "link to a file" else "nothing"))
    before = snapshot(tmp_path)
    with pytest.raises(EndpointInUse, match="not a socket") as caught:
        bound(folder / "broker.sock", router())
    assert caught.value.fields["path"] == str(found)
    assert snapshot(tmp_path) == before


def test_a_lock_that_is_a_symbolic_link_is_not_followed(tmp_path: Path, router: Router) -> None:
    target = tmp_path / "target"
    Path(f"{tmp_path}/broker.sock.lock").symlink_to(target)
    with pytest.raises(EndpointInUse):
        bound(tmp_path / "broker.sock", router())
    assert not target.exists()


def test_a_folder_that_cannot_be_made_is_an_error_of_ours_and_leaks_nothing(tmp_path: Path, router: Router) -> None:
    (tmp_path / "file").write_text("")
    made = router()
    before = open_fds()
    with pytest.raises(EndpointInUse, match=r"broker\.sock: "):
        bound(tmp_path / "file" / "broker.sock", made)
    assert open_fds() == before


def test_a_tcp_endpoint_has_no_link_and_learns_its_port(router: Router) -> None:
    endpoint = Endpoint("tcp://127.0.0.1:0")
    endpoint.bind(router(), 10)
    assert endpoint.listener is None
    assert int(endpoint.address.rpartition(":")[2]) > 0
    with pytest.raises(EndpointInUse, match="in use"):
        Endpoint(endpoint.address).bind(router(), 10)
    endpoint.close()


def test_twenty_brokers_find_twenty_ports(router: Router) -> None:
    endpoints = [Endpoint("tcp://127.0.0.1:0") for _ in range(20)]
    for endpoint in endpoints:
        endpoint.bind(router(), 10)
    assert len({endpoint.address for endpoint in endpoints}) == 20


def test_heartbeats_are_for_tcp_alone(tmp_path: Path, router: Router) -> None:
    made = router()
    tcp = Endpoint("tcp://127.0.0.1:0")
    tcp.bind(made, 10)
    ipc = Endpoint(f"ipc://{tmp_path}/broker.sock")
    ipc.bind(made, 10)
    assert made.get(zmq.HEARTBEAT_IVL) == 0
    ipc.close()
    tcp.close()


def test_the_door_counts_who_came_and_who_left(tmp_path: Path, router: Router) -> None:
    made = router()
    endpoint = bound(tmp_path / "broker.sock", made)
    door = Door(made, [], 100)
    door.watch()
    poller = zmq.Poller()
    poller.register(door.fileno(), zmq.POLLIN)

    def wait_for(count: int) -> None:
        while door.connections != count:
            assert poller.poll(WAIT_MS), f"{door.connections} connections, not {count}"
            door.watch()

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients = [context.socket(zmq.DEALER) for _ in range(3)]
    for client in clients:
        client.linger = 0
        client.connect(f"ipc://{tmp_path}/broker.sock")
    wait_for(3)
    for client in clients[:2]:
        client.close()
    wait_for(1)
    clients[2].close()
    wait_for(0)
    context.term()
    door.close()
    endpoint.close()


def test_descriptors_limit_the_clients_and_the_soft_limit_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard, 512), hard))
        assert clients_max(10, 1) == 10
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert not caplog.records
        allowed = clients_max(10**9, 4)
        assert 1 <= allowed < hard // FDS_PER_CLIENT
        assert "RLIMIT_NOFILE" in caplog.text
        assert clients_max(10**9, 10**9) == 1
        assert allowed <= connections_max(allowed, 4) < hard - allowed * (FDS_PER_CLIENT - 1)
        assert connections_max(10, 4) > connections_max(20, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
