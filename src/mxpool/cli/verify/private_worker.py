"""The private worker with the graph off: asked for, waited for, given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing

from mxpool.cli.surroundings import Calls, Surroundings
from mxpool.errors import DeadlineExceeded, ModelUnavailable, MxPoolError

POLL_S = 0.1


@contextlib.contextmanager
def private_worker(surroundings: Surroundings, model: str, load_timeout_s: float) -> Iterator[tuple[Calls, str]]:
    """A client and the name by which it can ask; the worker ends with the block, also if the program is killed.

    Raises:
        PermissionDenied: only administrators may start one (``admin_users``).
        Rejected: another one is there.
        ModelUnavailable: it cannot be loaded.
        DeadlineExceeded: it is not ready in time.
    """
    with closing(surroundings.client()) as client:
        name = str(client.control("reference", model)["model"])
        try:
            _await_ready(surroundings, client, name, load_timeout_s)
            yield client, name
        finally:
            with contextlib.suppress(MxPoolError):
                client.control("release")


def _await_ready(surroundings: Surroundings, client: Calls, name: str, load_timeout_s: float) -> None:
    end_s = surroundings.clock() + load_timeout_s
    while surroundings.clock() < end_s:
        with contextlib.suppress(ModelUnavailable):
            if client.metadata(name).get("state") == "ready":
                return
        found = client.status()["models"].get(name, {})
        if found.get("state") == "unavailable":
            raise ModelUnavailable(model=name, reason=found.get("reason", ""))
        surroundings.pause(POLL_S)
    raise DeadlineExceeded(timeout_s=load_timeout_s)
