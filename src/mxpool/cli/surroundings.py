"""What the commands of ``mxpool`` need around them: a client, the environment, a clock. Tests give their own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import typer

from mxpool import endpoint
from mxpool.errors import UnknownModel
from mxpool.spec import ModelSpec
from mxpool.tensors import Signature

Arrays = dict[str, npt.NDArray[Any]]


class Calls(Protocol):
    """The part of ``mxpool.Client`` that the commands call."""

    def infer(self, model: str, arrays: Mapping[str, npt.NDArray[Any]], *, timeout_s: float) -> Arrays:
        """One request and its answer."""
        ...

    def push(
        self, model: str, frames: Iterable[Mapping[str, npt.NDArray[Any]]], *, in_flight: int, timeout_s: float
    ) -> Iterator[Arrays]:
        """Many requests, ``in_flight`` at once; answers in order."""
        ...

    def status(self) -> dict[str, Any]:
        """The broker's counters, and those of its models and workers."""
        ...

    def models(self) -> list[str]:
        """Names of the models."""
        ...

    def metadata(self, model: str) -> dict[str, Any]:
        """Tensors and state of one model."""
        ...

    def control(self, verb: str, model: str = "", **args: Any) -> dict[str, Any]:
        """One control request."""
        ...

    def close(self) -> None:
        """Let go of the connection."""
        ...


class Found(Protocol):
    """What a probe found: see ``workers.backends.Loaded``."""

    @property
    def signature(self) -> Signature:
        """Names, datatypes and dims."""
        ...

    @property
    def report(self) -> dict[str, Any]:
        """More figures, by name."""
        ...


def _connect(at: str) -> Calls:
    from mxpool import Client  # noqa: PLC0415 - `check` needs no client

    client: Calls = Client(at)
    return client


def _probe(spec: ModelSpec, timeout_s: float) -> Found:
    from mxpool.workers.probe import probe  # noqa: PLC0415 - only `check` probes

    return probe(spec, timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Set once for each run. ``argument`` is the flag ``--endpoint``."""

    argument: str | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    connect: Callable[[str], Calls] = _connect
    probe: Callable[[ModelSpec, float], Found] = _probe
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], None] = time.sleep

    @property
    def endpoint(self) -> str:
        """Where the broker is; ConfigInvalid if flag or environment name no endpoint."""
        return endpoint.resolve(self.argument, self.environ)

    def client(self) -> Calls:
        """A new client of that broker; the caller closes it."""
        return self.connect(self.endpoint)


def around(ctx: typer.Context) -> Surroundings:
    """The surroundings of a running command."""
    found = ctx.find_object(Surroundings)
    return found if found is not None else Surroundings()


def set_endpoint(ctx: typer.Context, argument: str | None) -> None:
    """Remember the flag for the command that follows."""
    ctx.obj = replace(around(ctx), argument=argument)


def signature(client: Calls, model: str) -> Signature:
    """The tensors of ``model`` as its broker serves them; raises what ``Client.metadata`` does."""
    with naming_models(client):
        return Signature.from_wire(client.metadata(model))


@contextlib.contextmanager
def naming_models(client: Calls) -> Iterator[None]:
    """An UnknownModel from within also says which models there are."""
    try:
        yield
    except UnknownModel as error:
        names = ", ".join(client.models()) or "none"
        raise UnknownModel(f"{error.message}; there are: {names}", **error.fields) from None


def rows_of(arrays: Mapping[str, npt.NDArray[Any]], *, batched: bool) -> int:
    """Rows of one request: the length of the first axis, or 1 for a model without a batch axis."""
    first = next(iter(arrays.values()), np.zeros(0))
    return len(first) if batched and first.ndim else 1
