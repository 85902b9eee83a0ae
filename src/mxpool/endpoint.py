"""Where the broker is found: one rule for brokers, clients and the command line.

The argument (a flag, or ``Client(endpoint)``) wins, then MX_BROKER_ENDPOINT, then the system's socket where it exists,
then the user's runtime directory, then a directory of the user's own in /tmp.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mxpool.errors import ConfigInvalid

ENVIRONMENT_VARIABLE = "MX_BROKER_ENDPOINT"
SYSTEM_SOCKET = "/run/mx-broker/broker.sock"
LINK_SUFFIX = ".link"
UNIX_PATH_BYTES_MAX = 107  # sun_path less its NUL: unix(7)


def owner_on_disk(path: str) -> int | None:
    """The uid that owns ``path``; None if there is nothing, or nothing that we may see."""
    try:
        return Path(path).stat().st_uid
    except OSError:
        return None


def resolve(
    argument: str | None,
    environ: Mapping[str, str],
    *,
    uid: int | None = None,
    owner_of: Callable[[str], int | None] = owner_on_disk,
) -> str:
    """The endpoint to use, checked. ``uid`` is the user to resolve for (None: this process's).

    ``owner_of`` gives the uid that owns a path, None where there is no such path.

    Raises:
        ConfigInvalid: for an endpoint that ``check`` refuses, or if the fallback in /tmp belongs to another user (who
            could answer in the broker's place).
    """
    if argument is not None:
        return check(argument, source="endpoint")
    if environ.get(ENVIRONMENT_VARIABLE):
        return check(environ[ENVIRONMENT_VARIABLE], source=ENVIRONMENT_VARIABLE)
    if owner_of(SYSTEM_SOCKET) is not None:
        return f"ipc://{SYSTEM_SOCKET}"
    if environ.get("XDG_RUNTIME_DIR"):
        path = f"{environ['XDG_RUNTIME_DIR'].rstrip('/')}/mx-broker/broker.sock"
        return check(f"ipc://{path}", source="XDG_RUNTIME_DIR")
    uid = os.getuid() if uid is None else uid
    directory = f"/tmp/mx-broker-{uid}"
    owner = owner_of(directory)
    if owner not in (None, uid):
        raise ConfigInvalid(source="endpoint", key=directory, reason=f"belongs to uid {owner}, not to uid {uid}")
    return f"ipc://{directory}/broker.sock"


def check(endpoint: str, source: str = "endpoint") -> str:
    """``endpoint`` itself, if it is ``ipc://`` and an absolute path, or ``tcp://`` and a loopback address and a port.

    Port 0 means any free one; only a broker can use it.

    Raises:
        ConfigInvalid: for anything else; names ``source``, the value and the limit.
    """
    transport, separator, rest = endpoint.partition("://")
    if separator and transport == "ipc":
        reason = _ipc_fault(rest)
    elif separator and transport == "tcp":
        reason = _tcp_fault(rest)
    else:
        reason = "an endpoint is ipc://PATH or tcp://ADDRESS:PORT"
    if reason is not None:
        raise ConfigInvalid(source=source, key=repr(endpoint), reason=reason)
    return endpoint


def _ipc_fault(path: str) -> str | None:
    if not path.startswith("/") or "\0" in path:
        # A relative path means another socket in every directory; an abstract one (@name) has no permissions.
        return "an ipc path is absolute and has no NUL"
    try:
        size = len(path.encode()) + len(LINK_SUFFIX)
    except UnicodeEncodeError:
        return "an ipc path is text that UTF-8 can hold"
    if size > UNIX_PATH_BYTES_MAX:
        return f"the path has {size} bytes with the suffix {LINK_SUFFIX}, at most {UNIX_PATH_BYTES_MAX}"
    return None


def _tcp_fault(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port[:6]) <= 65535):
        return "the port of a tcp endpoint is a number from 0 to 65535"
    if host == "localhost":
        return None
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        parsed = ipaddress.ip_address(bare)
    except ValueError:
        return "a tcp endpoint names 127.0.0.0/8, [::1] or localhost"
    if not parsed.is_loopback or (parsed.version == 6) != (bare != host):
        return "a tcp endpoint is loopback only: 127.0.0.0/8, [::1] or localhost"
    return None
