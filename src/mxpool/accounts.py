"""Users and groups of this machine, by name or number."""

from __future__ import annotations

import grp
import pwd
from typing import Any

ID_MAX = 2**32 - 2  # -1 means "no user" to the kernel: setreuid(2)


def uid(account: Any) -> int:
    """The uid of a user's name, or the number itself.

    Raises:
        ValueError: if there is no such user, or the number is not a uid.
    """
    if isinstance(account, str) and "\0" not in account:
        try:
            return pwd.getpwnam(account).pw_uid
        except KeyError:
            raise ValueError("no user of that name") from None
    return _number(account, "uid")


def gid(account: Any) -> int:
    """The gid of a group's name, or the number itself; ValueError as ``uid``."""
    if isinstance(account, str) and "\0" not in account:
        try:
            return grp.getgrnam(account).gr_gid
        except KeyError:
            raise ValueError("no group of that name") from None
    return _number(account, "gid")


def _number(account: Any, what: str) -> int:
    if type(account) is int and 0 <= account <= ID_MAX:
        return account
    raise ValueError(f"neither a name nor a {what}")
