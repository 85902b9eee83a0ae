"""The broker of one combination: a real one, on a socket of its own, and gone afterwards with all that it started."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from mxpool.cli.surroundings import Calls
from mxpool.cli.sweep import tether
from mxpool.endpoint import ENVIRONMENT_VARIABLE
from mxpool.errors import BrokerLost, MxPoolError
from mxpool.exits import exit_words
from mxpool.switches import FIXED_INPUTS, GRAPH, SHARED_QUEUE

POLL_S = 0.05
END_MAX_S = 10.0  # what runs has 5 s once the broker is told to stop
OVERRIDES = (ENVIRONMENT_VARIABLE, GRAPH, SHARED_QUEUE, FIXED_INPUTS)  # are in the file already, or would change it


class CannotServe(Exception):
    """A combination cannot be measured; the text says why."""


class SweptBroker:
    """A broker from ``start`` to ``end``. Its folder is in /tmp: the path of a socket has 107 bytes at most."""

    def __init__(self, model: str, environ: Mapping[str, str]) -> None:
        self._model = model
        self.environ = {name: value for name, value in environ.items() if name not in OVERRIDES}
        self._undo = contextlib.ExitStack()
        self.folder = Path()
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SweptBroker:
        self.folder = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="mxpool-sweep-", dir="/tmp")))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        finally:
            self._undo.close()

    @property
    def endpoint(self) -> str:
        """Where it listens, once it runs."""
        return f"ipc://{self.folder}/broker.sock"

    @property
    def log_path(self) -> Path:
        """What it and its workers write to stderr."""
        return self.folder / "log"

    def start(self, config: str) -> None:
        """Start it with the text of a config file; waits for nothing."""
        path = self.folder / "config.toml"
        path.write_text(config, encoding="utf-8")
        with self.log_path.open("ab") as log:
            arguments = [str(path), "--log-level", "warning"]
            self.process = tether.start("broker", arguments, log=log, environ=self.environ)

    def wait_ready(
        self, client: Calls, within_s: float, clock: Callable[[], float], pause: Callable[[float], None]
    ) -> dict[str, Any]:
        """Wait until every worker is ready; the broker's status then.

        Raises:
            CannotServe: the broker ended, the model is unavailable, a worker died, or the time is over.
        """
        end_s = clock() + within_s
        while True:
            self._check_alive()
            state, status = "no answer from the broker", None
            with contextlib.suppress(BrokerLost):
                status = client.status()
                state = self._state(status)
            if status is not None and not state:
                return status
            if clock() >= end_s:
                raise CannotServe(f"not ready within {within_s:g} s: {state}")
            pause(POLL_S)

    def _check_alive(self) -> None:
        code = self.process.poll() if self.process else None
        if code is not None:
            raise CannotServe(f"the broker ended with {exit_words(code)}: {self.last_words()}")

    def _state(self, status: Mapping[str, Any]) -> str:
        """What is not ready yet; "" for nothing."""
        model = status["models"][self._model]
        if model["state"] == "unavailable":
            raise CannotServe(str(model["reason"]))
        waiting = [worker for worker in model["workers"] if worker["state"] != "ready"]
        for worker in waiting:
            if worker["reason"]:  # it has died once: with fewer workers it might not have
                raise CannotServe(f"{worker['worker']}: {worker['reason']}")
        return ", ".join(f"{worker['worker']} is {worker['state']}" for worker in waiting)

    def last_words(self) -> str:
        """The last line of the log."""
        lines = self.log_path.read_text(errors="replace").split("\n") if self.log_path.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")[:500]

    def _end(self) -> None:
        """SIGTERM, then SIGKILL; the workers of a killed broker end by themselves, or are killed."""
        if self.process is None:
            return
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        try:
            self.process.wait(END_MAX_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, left = psutil.wait_procs(children, timeout=END_MAX_S)
        for child in left:
            with contextlib.suppress(psutil.Error):
                child.kill()


def closed_quietly(client: Calls) -> None:
    """Close a client whose broker may be gone."""
    with contextlib.suppress(MxPoolError):
        client.close()
