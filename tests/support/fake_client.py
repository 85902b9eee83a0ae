"""A client for the tests of commands: it answers from a script and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from typer.testing import CliRunner

from mxpool.cli.main import app
from mxpool.cli.surroundings import Arrays, Surroundings
from mxpool.errors import MxPoolError, UnknownModel
from mxpool.tensors import Signature, TensorSpec

ENDPOINT = "ipc:///run/fake/broker.sock"
ROWS = Signature((TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "FP32", (3,)),), 8)
SINGLE = Signature((TensorSpec("x", "FP32", (3,)),), (TensorSpec("y", "FP32", (3,)),), 0)
IMAGES = Signature((TensorSpec("image", "FP32", (3, 4, 6)),), (TensorSpec("y", "FP32", (3, 4, 6)),), 8)
PAIR = Signature((TensorSpec("a", "FP32", (2,)), TensorSpec("b", "INT64", (1,))), (TensorSpec("y", "FP32", (2,)),), 8)


class FakeClient:
    """Doubles its inputs. ``failures`` maps the number of a request, from 0, to what it raises."""

    def __init__(
        self,
        signature: Signature = ROWS,
        *,
        failures: Mapping[int, MxPoolError] | None = None,
        replies: Mapping[str, dict[str, Any]] | None = None,
        status: Mapping[str, Any] | None = None,
    ) -> None:
        self.signature = signature
        self.failures = dict(failures or {})
        self.replies = dict(replies or {})
        self.answered_status = dict(status or {})
        self.sent: list[Arrays] = []
        self.verbs: list[tuple[str, str]] = []
        self.endpoints: list[str] = []
        self.closed = 0

    def connect(self, endpoint: str) -> FakeClient:
        self.endpoints.append(endpoint)
        return self

    def infer(self, model: str, arrays: Mapping[str, npt.NDArray[Any]], *, timeout_s: float) -> Arrays:
        return next(iter(self.push(model, [arrays], in_flight=1, timeout_s=timeout_s)))

    def push(
        self, model: str, frames: Iterable[Mapping[str, npt.NDArray[Any]]], *, in_flight: int, timeout_s: float
    ) -> Iterator[Arrays]:
        assert model == "ranking"
        assert in_flight >= 1
        assert timeout_s > 0
        for frame in frames:
            number = len(self.sent)
            self.sent.append({name: np.array(array) for name, array in frame.items()})
            if number in self.failures:
                raise self.failures[number]
            outputs = [spec.name for spec in self.signature.outputs]
            yield {name: array * 2 for name, array in zip(outputs, self.sent[-1].values(), strict=False)}

    def status(self) -> dict[str, Any]:
        return self.answered_status

    def models(self) -> list[str]:
        return ["ranking"]

    def metadata(self, model: str) -> dict[str, Any]:
        if model != "ranking":
            raise UnknownModel(model=model)
        return {"name": model, "state": "ready", **self.signature.to_wire()}

    def control(self, verb: str, model: str = "", **args: Any) -> dict[str, Any]:
        assert not args
        self.verbs.append((verb, model))
        if verb in self.replies:
            return self.replies[verb]
        raise UnknownModel(model=model)

    def close(self) -> None:
        self.closed += 1


class Ran:
    """What a command printed, and its exit code."""

    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr


def mxpool(client: FakeClient, *args: object, **surroundings: Any) -> Ran:
    """Run ``mxpool ARGS`` against ``client``; an error that is no exit is raised here."""
    around = Surroundings(connect=client.connect, environ={}, **surroundings)
    line = [str(arg) for arg in ("-e", ENDPOINT, *args)]
    result = CliRunner().invoke(app, line, obj=around, catch_exceptions=False)
    return Ran(result.exit_code, result.stdout, result.stderr)
