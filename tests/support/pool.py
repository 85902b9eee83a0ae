"""A whole pool for a test: a real ``mx-broker`` on a socket of its own, and a look afterwards that it left nothing.

    with Pool({"echo": echo(delay_ms=5)}) as pool, pool.client() as client:
        client.infer("echo", {"x": np.ones((1, 4), np.float32)})

Every process that a pool starts, workers and their children too, carries the pool's token in its environment: that is
how the end of the test finds what was left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from mxpool import Client
from mxpool.errors import MxPoolError

TOKEN_VARIABLE = "MXPOOL_TEST_POOL"
SOAK = os.environ.get("MXPOOL_SOAK") == "1"  # scripts/soak: counts and times as the hazards name them
START_MAX_S = 30.0
END_MAX_S = 20.0
STEP_S = 0.005
SCRIPT = Path(sys.executable).with_name("mx-broker")
MX_BROKER = [str(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "mxpool.cli.broker"]  # not installed


def soak(whole: int, reduced: int | None = None) -> int:
    """``whole`` under scripts/soak, else ``reduced``, a tenth by default."""
    return whole if SOAK else reduced if reduced is not None else max(whole // 10, 1)


def wait_until(holds: Callable[[], Any], what: str, timeout_s: float = 10.0) -> Any:
    """Ask ``holds`` until it says something true, and return that; AssertionError with ``what`` after ``timeout_s``.

    For what tells nobody when it happens. Where there is a descriptor, a future or an answer to wait for, use that.
    """
    pause, end_s = threading.Event(), time.monotonic() + timeout_s
    while not (found := holds()) and time.monotonic() < end_s:
        pause.wait(STEP_S)
    if found:
        return found
    raise AssertionError(f"not within {timeout_s} s: {what}")


def echo(max_batch_size: int = 8, workers: int = 1, **keys: Any) -> dict[str, Any]:
    """The table of a model with the echo backend. Keys that the config does not have are the backend's options."""
    options = {key: keys.pop(key) for key in list(keys) if key in ECHO_OPTIONS}
    return {
        "path": "/none/echo",
        "backend": "echo",
        "max_batch_size": max_batch_size,
        "workers": {"cpu": workers},
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in options.items()},
        **keys,
    }


ECHO_OPTIONS = {"tensors", "scale", "offset", "delay_ms", "in_flight", "gate", "crash_on", "hang_on", "fail_on",
                "load_delay_ms", "load_exit", "abort_on_load"}  # fmt: skip


def to_toml(tree: Mapping[str, Any]) -> str:
    """A config file: ``{"broker": {...}, "models": {"name": {...}}}``."""
    lines = ["[broker]", *_keys(tree.get("broker", {}))]
    for kind in ("devices", "models"):
        for name, table in tree.get(kind, {}).items():
            lines += [f"[{kind}.{json.dumps(name)}]", *_keys(table)]
    return "\n".join(lines) + "\n"


def _keys(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"{json.dumps(key)} = {_value(value)}" for key, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_keys(value)) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return json.dumps(value)


def shared_memory_names() -> set[str]:
    """Names of ours in /dev/shm. There is one only for the moment in which a segment is made."""
    return {name for name in os.listdir("/dev/shm") if "mxpool" in name}  # noqa: PTH208 - names, not paths


class Pool:
    """One broker process, from ``start`` to ``end``; as a context manager, both.

    Args:
        models: tables of the config by name; see ``echo``.
        broker: more keys of ``[broker]``.
        devices: ``[devices.NAME]`` tables.
        endpoint: one or more addresses, if it is not to be a path in the pool's own folder.
        prefix: what to run the broker under: ``["prlimit", "--nofile=256"]``.
        environ: variables beside those of the test.
        ready: the models to wait for; None for all, ``()`` for none: then only for an answer of the broker.
        log_level: of the broker.
    """

    def __init__(
        self,
        models: Mapping[str, Mapping[str, Any]],
        *,
        broker: Mapping[str, Any] | None = None,
        devices: Mapping[str, Mapping[str, Any]] | None = None,
        endpoint: str | Sequence[str] | None = None,
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        ready: Sequence[str] | None = None,
        log_level: str = "info",
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mxpool-test-"))  # short: a socket's path has 107 bytes at most
        self.token = secrets.token_hex(8)
        self.log_path = self.folder / "broker.log"
        self.config_path = self.folder / "config.toml"
        asked = f"ipc://{self.folder}/broker.sock" if endpoint is None else endpoint
        addresses = [asked] if isinstance(asked, str) else list(asked)
        self.tree = {"broker": {"endpoint": addresses, **(broker or {})}, "devices": devices or {}, "models": models}
        self.endpoint, self.endpoints = addresses[0], addresses  # as bound, once the pool is ready
        self._prefix = [*prefix]
        self._environ = {**os.environ, **(environ or {}), TOKEN_VARIABLE: self.token}
        self._ready = list(models) if ready is None else list(ready)
        self._log_level = log_level
        self._client: Client | None = None
        self._starts = 0
        self._names_before = shared_memory_names()  # of another run that was killed, say
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Pool:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self._abort()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._abort()
            return
        try:
            self.end()
        finally:
            self._abort()

    # Life

    def start(self) -> None:
        """Start the broker; again, if it has ended. Waits for nothing."""
        self._starts += 1
        self.config_path.write_text(to_toml(self.tree))
        command = [*self._prefix, *MX_BROKER, str(self.config_path), "--log-level", self._log_level]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environ, cwd=self.folder
            )

    def wait_ready(self, timeout_s: float = START_MAX_S) -> None:
        """Wait until the broker answers and every worker of the awaited models is ready."""
        try:
            wait_until(self._is_ready, "a pool that is ready", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; its log:\n{self.log()}") from None

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the broker ended with {self.process.returncode}:\n{self.log()}"
        found = re.findall(r"serving endpoints=(\S+)", self.log())
        if len(found) < self._starts:
            return False
        self.endpoints = found[-1].split(",")
        self.endpoint = self.endpoints[0]
        try:
            models = self.stats()["models"]
        except MxPoolError:
            return False
        for name in self._ready:
            assert models[name]["state"] != "unavailable", f"{name}: {models[name]['reason']}\n{self.log()}"
            if any(worker["state"] != "ready" for worker in models[name]["workers"]):
                return False
        return True

    def end(self, exit_code: int = 0, *, number: int = signal.SIGTERM, within_s: float = END_MAX_S) -> None:
        """End the broker by ``number`` and look that it left nothing: no process, no name, no socket, no traceback."""
        self.let_go()
        self.kill(number)
        assert self.wait(within_s) == exit_code, self.log()
        self.check_nothing_left()
        assert "Traceback" not in self.log(), self.log()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the broker a signal, if it is there; with SIGSTOP, wait until it has stopped."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)
            if number == signal.SIGSTOP:
                os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def wait(self, within_s: float = END_MAX_S) -> int:
        """Wait for the broker's end; its exit code, negative for a signal."""
        assert self.process is not None
        return self.process.wait(within_s)

    def let_go(self) -> None:
        """Close the pool's own client, which ``stats`` opens again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def check_nothing_left(self, within_s: float = 5.0) -> None:
        """Fail if a process of this pool is there, or a name in /dev/shm, or a socket of an orderly end."""
        wait_until(lambda: not self.processes(), f"the end of {self.processes()}", within_s)
        wait_until(lambda: not shared_memory_names() - self._names_before, "the end of names in /dev/shm", within_s)
        assert self.process is not None
        if self.process.returncode == 0:
            assert [path.name for path in self.folder.glob("*.sock*")] == []

    def _abort(self) -> None:
        """Whatever happened, leave the machine as it was."""
        with contextlib.suppress(MxPoolError):
            self.let_go()
        self.kill()
        if self.process is not None:
            self.process.wait(END_MAX_S)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        self.folder.rmdir()

    # What can be seen of it

    def client(self) -> Client:
        """A new client; the caller closes it."""
        return Client(self.endpoint)

    def stats(self) -> dict[str, Any]:
        """The broker's ``stats``, asked by a client that the pool keeps (one of the broker's connected clients)."""
        if self._client is None:
            self._client = Client(self.endpoint)
        return self._client.control("stats", timeout_s=5)

    def model(self, name: str = "echo") -> dict[str, Any]:
        """The ``stats`` of one model."""
        found: dict[str, Any] = self.stats()["models"][name]
        return found

    def control(self, verb: str, model: str = "", **arguments: Any) -> dict[str, Any]:
        """One control request by the pool's own client."""
        self.stats()
        assert self._client is not None
        return self._client.control(verb, model, timeout_s=5, **arguments)

    @property
    def pid(self) -> int:
        """The broker's process id, also where it runs under a prefix that does not exec it."""
        return int(self.stats()["broker"]["pid"])

    def worker_pids(self, model: str = "echo") -> list[int]:
        """The process ids of a model's workers, by their names."""
        return [worker["pid"] for worker in self.model(model)["workers"] if worker["pid"] is not None]

    def processes(self) -> list[psutil.Process]:
        """Every process that carries this pool's token, without zombies: the broker, its workers, theirs."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(TOKEN_VARIABLE) == self.token:
                    found.append(process)
        return found

    def log(self) -> str:
        """All that the broker and its workers have written to stderr."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def rss_bytes(self) -> int:
        """Resident memory of the broker that is its own, not its clients' arenas or slots."""
        memory = psutil.Process(self.pid).memory_info()
        return int(memory.rss - memory.shared)
