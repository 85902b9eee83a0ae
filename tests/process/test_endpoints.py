"""Where a broker may listen, what it never touches, and what it finds after another one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq
from gates import x
from pool import MX_BROKER, Pool, echo, soak, to_toml, wait_until

from mxpool import Client
from mxpool.broker.endpoints import Endpoint
from mxpool.endpoint import UNIX_PATH_BYTES_MAX
from mxpool.errors import EndpointInUse

MXPOOL = str(Path(MX_BROKER[0]).with_name("mxpool"))
SECRET = b"not a socket\n"


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool({"echo": echo()}) as pool:
        yield pool


def refused(tmp_path: Path, endpoint: str, *, code: int, model: str = "echo") -> str:
    """What a broker says that must not start at ``endpoint``."""
    config = tmp_path / "config.toml"
    config.write_text(to_toml({"broker": {"endpoint": endpoint}, "models": {model: echo()}}))
    ran = subprocess.run([*MX_BROKER, str(config)], capture_output=True, text=True, timeout=20, check=False)
    assert ran.returncode == code, ran.stderr
    assert "Traceback" not in ran.stderr
    return ran.stderr


def short_folder(tmp_path: Path) -> str:
    """A short way to ``tmp_path``, whose own name may be too long for a socket."""
    return f"/proc/self/cwd/{os.path.relpath(tmp_path)}" if len(str(tmp_path)) > 80 else str(tmp_path)


# B1


def test_a_path_that_is_too_long_is_refused_by_config_check_and_start_alike(tmp_path: Path) -> None:
    path = f"/run/{'d' * 120}/broker.sock"
    text = refused(tmp_path, f"ipc://{path}", code=2)
    assert path[:60] in text
    assert str(len(path) + len(".link")) in text
    assert str(UNIX_PATH_BYTES_MAX) in text
    checked = subprocess.run(
        [MXPOOL, "check", str(tmp_path / "config.toml")], capture_output=True, text=True, timeout=20, check=False
    )
    assert checked.returncode == 2
    assert checked.stderr == text


def test_two_long_names_with_a_common_beginning_are_both_refused_and_never_shortened(tmp_path: Path) -> None:
    common = tmp_path / ("n" * 100)
    for name in ("a", "b"):
        text = refused(tmp_path, f"ipc://{common}{name}", code=2)
        assert str(common)[:60] in text
        assert str(UNIX_PATH_BYTES_MAX) in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml"]


def test_a_model_name_of_200_characters_is_refused_by_name(tmp_path: Path) -> None:
    name = "m" * 200
    text = refused(tmp_path, "ipc:///tmp/mxpool-never.sock", code=2, model=name)
    assert name[:40] in text
    assert "at most 64" in text


# B3


@pytest.mark.parametrize("suffix", ["", ".link"])
@pytest.mark.parametrize("kind", ["file", "directory", "symlink", "fifo", "symlink to a socket"])
def test_what_is_no_socket_of_a_broker_is_named_and_left_as_it_is(tmp_path: Path, kind: str, suffix: str) -> None:
    folder = Path(short_folder(tmp_path))
    path = folder / "broker.sock"
    taken = folder / f"broker.sock{suffix}"
    target = folder / "elsewhere"
    listener = None
    match kind:
        case "file":
            taken.write_bytes(SECRET)
        case "directory":
            taken.mkdir()
            (taken / "inside").write_bytes(SECRET)
        case "symlink":
            target.write_bytes(SECRET)
            taken.symlink_to(target)
        case "fifo":
            os.mkfifo(taken)
        case _:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(target))
            taken.symlink_to(target)
    before = taken.lstat()
    assert str(taken) in refused(tmp_path, f"ipc://{path}", code=1)
    after = taken.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    if kind == "file":
        assert taken.read_bytes() == SECRET
    if kind == "directory":
        assert (taken / "inside").read_bytes() == SECRET
    if kind == "symlink":
        assert target.read_bytes() == SECRET
    if listener is not None:
        listener.close()
        assert target.is_socket()


def test_a_lock_file_that_is_a_symlink_is_not_followed(tmp_path: Path) -> None:
    folder = Path(short_folder(tmp_path))
    (folder / "elsewhere").write_bytes(SECRET)
    (folder / "broker.sock.lock").symlink_to(folder / "elsewhere")
    assert str(folder / "broker.sock") in refused(tmp_path, f"ipc://{folder}/broker.sock", code=1)
    assert (folder / "elsewhere").read_bytes() == SECRET


# Two brokers, and none


def test_a_second_broker_on_a_path_is_refused_also_by_another_name_of_its_folder(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "other-name").symlink_to(pool.folder)
    for folder in (pool.folder, Path(short_folder(tmp_path)) / "other-name"):
        assert "another broker serves there" in refused(tmp_path, f"ipc://{folder}/broker.sock", code=1)
    with pool.client() as client:
        assert client.infer("echo", x(3))["y"][0, 0] == 3


def test_a_broker_that_was_killed_leaves_sockets_that_the_next_one_takes_over(pool: Pool) -> None:
    first = pool.stats()["broker"]["epoch"]
    pool.let_go()
    pool.kill(signal.SIGKILL)
    pool.wait()
    assert sorted(path.name for path in pool.folder.glob("*.sock*")) == [
        "broker.sock",
        "broker.sock.link",
        "broker.sock.lock",
    ]
    pool.check_nothing_left()
    pool.start()
    pool.wait_ready()
    assert pool.stats()["broker"]["epoch"] != first
    with pool.client() as client:
        assert client.infer("echo", x(3))["y"][0, 0] == 3


def test_a_lock_that_its_last_holder_removes_just_then_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, real = Path(f"{short_folder(tmp_path)}/broker.sock.lock"), fcntl.flock
    taken: list[int] = []

    def flock(fd: int, operation: int) -> None:
        taken.append(fd)
        if len(taken) == 1:
            lock.unlink()  # as a broker does that ends between our open and our lock
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    address = f"ipc://{str(lock)[:-5]}"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, closing(Endpoint(address)) as endpoint:
        endpoint.bind(router, 10)
        assert len(taken) == 2
        with pytest.raises(EndpointInUse, match="another broker serves there"):
            Endpoint(address).bind(router, 10)


def test_only_owner_and_group_may_connect(pool: Pool) -> None:
    for name in ("broker.sock", "broker.sock.link"):
        assert (pool.folder / name).stat().st_mode & 0o777 == 0o660


def test_one_broker_serves_on_a_path_and_on_tcp(tmp_path: Path) -> None:
    folder = short_folder(tmp_path)
    endpoint = [f"ipc://{folder}/a.sock", "tcp://127.0.0.1:0", f"ipc://{folder}/b.sock"]
    with Pool({"echo": echo()}, endpoint=endpoint) as pool:
        for bound in pool.endpoints:
            with Client(bound) as client:
                assert client.infer("echo", x(8))["y"][0, 0] == 8
        assert pool.endpoints[1] != "tcp://127.0.0.1:0"
    assert list(Path(folder).glob("*.sock*")) == []


# E5


def test_brokers_that_start_at_once_with_free_ports_never_collide() -> None:
    pools = [Pool({"echo": echo()}, endpoint="tcp://127.0.0.1:0") for _ in range(soak(20, 4))]
    with ExitStack() as stack:
        for pool in pools:
            stack.push(pool)
            pool.start()
        for pool in pools:
            pool.wait_ready(60)
        assert len({pool.endpoint for pool in pools}) == len(pools)
        for number, pool in enumerate(pools):
            with pool.client() as client:
                assert client.infer("echo", x(number))["y"][0, 0] == number


def test_a_tcp_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert endpoint in refused(tmp_path, endpoint, code=1)


def test_a_client_finds_the_broker_by_the_variable(pool: Pool) -> None:
    environ = {**os.environ, "MX_BROKER_ENDPOINT": pool.endpoint}
    ran = subprocess.run(
        [MXPOOL, "models", "--json"], env=environ, capture_output=True, text=True, timeout=20, check=True
    )
    assert "echo" in json.dumps(json.loads(ran.stdout))
    wait_until(lambda: pool.stats()["broker"]["linked_clients"] == 1, "the command's link ended")
