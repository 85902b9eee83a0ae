"""Exit codes of the programs, and how an error becomes one: a line on stderr, no traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from mxpool.errors import BrokerLost, ConfigInvalid, InvalidRequest, MxPoolError, Rejected

OK = 0
FAILURE = 1  # asked for, and did not come about: a model cannot be served, a batch failed, a deadline passed
USAGE = 2  # a bad config, flag, variable or file: the same call will fail again (systemd does not restart it)
UNREACHABLE = 3  # no broker answers at the endpoint
REFUSED = 4  # the broker answered, and refused


class BadSource(Exception):
    """A file or flag given to a command cannot be used; the text names it."""


def exit_code(error: MxPoolError) -> int:
    """The exit code for ``error``."""
    match error:
        case ConfigInvalid():
            return USAGE
        case BrokerLost():
            return UNREACHABLE
        case InvalidRequest() | Rejected():
            return REFUSED
    return FAILURE


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn an error of ours into ``code: text`` on stderr and the exit code."""
    try:
        yield
    except MxPoolError as error:
        typer.echo(f"{error.code}: {error}", err=True)
        raise typer.Exit(exit_code(error)) from None
    except BadSource as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(USAGE) from None
