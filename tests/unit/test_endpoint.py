from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mxpool.endpoint import SYSTEM_SOCKET, UNIX_PATH_BYTES_MAX, check, owner_on_disk, resolve
from mxpool.errors import ConfigInvalid

ENVIRONMENT = {"MX_BROKER_ENDPOINT": "tcp://127.0.0.1:5555", "XDG_RUNTIME_DIR": "/run/user/7/"}


def owners(**by_path: int) -> Callable[[str], int | None]:
    return {path.replace("_SOCKET_", SYSTEM_SOCKET): uid for path, uid in by_path.items()}.get


NOTHING = owners()
SYSTEM = owners(_SOCKET_=0)


def test_the_argument_wins_then_the_variable_then_the_system_then_the_user_then_tmp() -> None:
    assert resolve("ipc:///a", ENVIRONMENT, uid=7, owner_of=SYSTEM) == "ipc:///a"
    assert resolve(None, ENVIRONMENT, uid=7, owner_of=SYSTEM) == "tcp://127.0.0.1:5555"
    runtime = {"XDG_RUNTIME_DIR": "/run/user/7/", "MX_BROKER_ENDPOINT": ""}
    assert resolve(None, runtime, uid=7, owner_of=SYSTEM) == f"ipc://{SYSTEM_SOCKET}"
    assert resolve(None, runtime, uid=7, owner_of=NOTHING) == "ipc:///run/user/7/mx-broker/broker.sock"
    assert resolve(None, {}, uid=7, owner_of=NOTHING) == "ipc:///tmp/mx-broker-7/broker.sock"
    assert resolve(None, {}, uid=7, owner_of=lambda path: 7 if "/tmp/" in path else None).startswith("ipc:///tmp/")


def test_a_directory_in_tmp_that_another_user_made_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="belongs to uid 8"):
        resolve(None, {}, uid=7, owner_of=lambda path: 8 if path == "/tmp/mx-broker-7" else None)


def test_a_bad_value_is_refused_under_the_name_of_where_it_stands() -> None:
    with pytest.raises(ConfigInvalid, match="MX_BROKER_ENDPOINT"):
        resolve(None, {"MX_BROKER_ENDPOINT": "tcp://10.0.0.1:1"}, uid=7, owner_of=NOTHING)
    with pytest.raises(ConfigInvalid, match="XDG_RUNTIME_DIR"):
        resolve(None, {"XDG_RUNTIME_DIR": "/" + "d" * 100}, uid=7, owner_of=NOTHING)


@pytest.mark.parametrize(
    "endpoint",
    [
        "ipc:///run/mx-broker/broker.sock",
        "ipc:///" + "p" * (UNIX_PATH_BYTES_MAX - 6),
        "tcp://127.0.0.1:5555",
        "tcp://127.255.0.9:1",
        "tcp://[::1]:65535",
        "tcp://localhost:5555",
        "tcp://127.0.0.1:0",
    ],
)
def test_endpoints_on_this_host_pass(endpoint: str) -> None:
    assert check(endpoint) == endpoint


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("ipc:///" + "p" * (UNIX_PATH_BYTES_MAX - 5), "108 bytes .* at most 107"),
        ("ipc:///" + "é" * 51, "108 bytes"),
        ("ipc://relative.sock", "absolute"),
        ("ipc://@abstract", "absolute"),
        ("ipc://*", "absolute"),
        ("ipc:///a\0b", "NUL"),
        ("ipc:///\udc80", "UTF-8"),
        ("tcp://10.0.0.1:5555", "loopback"),
        ("tcp://0.0.0.0:5555", "loopback"),
        ("tcp://*:5555", "127.0.0.0/8"),
        ("tcp://example.org:5555", "localhost"),
        ("tcp://[127.0.0.1]:5555", "loopback"),
        ("tcp://::1:5555", "loopback"),
        ("tcp://[::2]:5555", "loopback"),
        ("tcp://127.0.0.1:65536", "65535"),
        ("tcp://127.0.0.1:99999999999", "65535"),
        ("tcp://127.0.0.1:", "port"),
        ("tcp://127.0.0.1", "port"),
        ("tcp://127.0.0.1:-1", "port"),
        ("tcp://127.0.0.1:٣", "port"),
        ("udp://127.0.0.1:1", "ipc://PATH"),
        ("/run/x.sock", "ipc://PATH"),
        ("", "ipc://PATH"),
    ],
)
def test_any_other_endpoint_is_refused_with_its_value_and_what_is_allowed(endpoint: str, said: str) -> None:
    with pytest.raises(ConfigInvalid, match=said) as caught:
        check(endpoint, "here")
    assert caught.value.fields["source"] == "here"
    assert caught.value.fields["key"] == repr(endpoint)


def test_an_owner_is_read_from_the_disk(tmp_path: Path) -> None:
    assert owner_on_disk(str(tmp_path)) == tmp_path.stat().st_uid
    assert owner_on_disk(str(tmp_path / "nothing")) is None
