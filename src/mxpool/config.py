"""What a broker serves: checked once, frozen from then on.

``read`` takes a TOML file, ``build`` the same tree from elsewhere; both fill every default and refuse what they do not
know. Each key carries its description, unit and range; docs/config.md is generated from them, and so are the errors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from mxpool import accounts, endpoint
from mxpool.errors import ConfigInvalid
from mxpool.faults import Fault, cross_faults, invalid, pydantic_faults
from mxpool.spec import BACKENDS, ModelSpec, default_sizes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME_PATTERN = "^[a-z0-9][a-z0-9._-]{0,63}$"
_NAMES = "a-z, 0-9, '.', '_' and '-', at most 64 characters, the first a letter or digit"
DAY_MS = 86_400_000
I64_MAX = 2**63 - 1


def _number(default: Any, low: int, high: int, text: str, unit: str = "", shown: str = "") -> Any:
    extra: dict[str, Any] = {"unit": unit, "allowed": f"{low:_} to {high:_}", "default": shown, "reloadable": False}
    return Field(default, ge=low, le=high, description=text, json_schema_extra=extra)


def _choice(default: Any, allowed: str, text: str, shown: str = "", **limits: Any) -> Any:
    extra: dict[str, Any] = {"unit": "", "allowed": allowed, "default": shown, "reloadable": False}
    if callable(default):
        return Field(default_factory=default, description=text, json_schema_extra=extra, **limits)
    return Field(default, description=text, json_schema_extra=extra, **limits)


def _tuple(value: Any) -> Any:
    """TOML has arrays only; a frozen config holds tuples."""
    return tuple(value) if isinstance(value, list) else value


def _option(value: Any) -> Any:
    if isinstance(value, bool | str | float) or (isinstance(value, int) and -I64_MAX <= value <= I64_MAX):
        return value
    raise ValueError("not a string, number or boolean of at most 64 bits")


def _endpoint(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("not a string")
    try:
        return endpoint.check(value)
    except ConfigInvalid as error:
        raise ValueError(error.fields["reason"]) from None


Name = Annotated[str, Field(pattern=NAME_PATTERN, json_schema_extra={"allowed": _NAMES})]
Count = Annotated[int, Field(ge=1, le=256)]
Dims = Annotated[tuple[Annotated[int, Field(ge=1, le=2**31 - 1)], ...], BeforeValidator(_tuple), Field(max_length=15)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, le=65_536)], ...], BeforeValidator(_tuple)]
Endpoints = Annotated[
    tuple[Annotated[str, BeforeValidator(_endpoint)], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else _tuple(value)),
]
Users = Annotated[tuple[Annotated[int, BeforeValidator(accounts.uid)], ...], BeforeValidator(_tuple)]
Groups = Annotated[tuple[Annotated[int, BeforeValidator(accounts.gid)], ...], BeforeValidator(_tuple)]
Option = Annotated[Any, BeforeValidator(_option)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)


class BrokerConfig(_Frozen):
    """The ``[broker]`` table."""

    endpoints: Endpoints = _choice(
        tuple,
        "ipc:// with a path of at most 102 bytes, or tcp:// on loopback; a string or an array",
        "Where clients connect. The link socket of an ipc endpoint lies beside it, with the suffix .link.",
        "see MX_BROKER_ENDPOINT",
        alias="endpoint",
    )
    arenas: bool = _choice(True, "true, false", "Whether clients on ipc may pass large frames in memory of their own.")
    arena_users: Users = _choice(
        tuple,
        "user names or uids",
        "Users who may pass frames in memory of their own, beside the broker's user.",
    )
    arena_groups: Groups = _choice(
        tuple, "group names or gids", "Groups whose members may do the same, beside the group of the socket."
    )
    admin_users: Users = _choice(
        tuple,
        "user names or uids",
        "Users who may drain models and verify their graphs, beside root and the broker's user.",
    )
    max_message_bytes: int = _number(64 << 20, 65_536, 1 << 31, "Largest message that is read.", "bytes")
    max_clients: int = _number(4096, 1, 1_000_000, "Clients connected at once; more are refused.")
    outbox_messages: int = _number(
        4096, 1, 1_000_000, "Answers that may wait for a client that does not read; beyond it the client is dropped."
    )
    outbox_bytes: int = _number(64 << 20, 65_536, 1 << 40, "The same limit in bytes.", "bytes")
    heartbeat_s: float = _number(10.0, 1, 3600, "Time between heartbeats on tcp; ipc needs none.", "s")


class DeviceConfig(_Frozen):
    """One ``[devices.NAME]`` table: something that workers run on."""

    kind: Literal["cpu", "cuda", "maca"] = _choice(..., "cpu, cuda, maca", "The kind of device.")
    index: int = _number(0, 0, 63, "Which device of that kind, as the vendor's tool counts them.")


class ModelConfig(_Frozen):
    """One ``[models.NAME]`` table: a file, how it is batched, and where it runs."""

    path: str = _choice(
        ...,
        "a file that ends in .onnx (any, if backend is set)",
        "The model file; a relative path starts at the config file's folder.",
        min_length=1,
    )
    backend: Name | None = _choice(
        None, "onnxruntime, or a name from the entry point mxpool.backends", "What runs it.", "by the suffix"
    )
    max_batch_size: int = _number(128, 0, 65_536, "Rows of one batch; 0 runs one request at a time.", "rows")
    dims: Mapping[str, Dims] = _choice(
        dict, "input name = array of at most 15 dims of 1 or more", "Dims of one row, for inputs whose dims are open."
    )
    batch_sizes: Sizes = _choice(
        tuple,
        "ascending, the last one max_batch_size",
        "Batch sizes to prepare; a batch is padded to the next.",
        "powers of two",
    )
    graph_batch_sizes: Sizes = _choice(
        tuple,
        "ascending, the last one max_batch_size; on maca only that one",
        "Batch sizes at which a device graph is captured and replayed, instead of batch_sizes.",
        "cuda: 1, 8, 32 and max_batch_size; maca: max_batch_size",
    )
    graph: Literal["off", "prefer", "require"] = _choice(
        "prefer", "off, prefer, require", "Whether a captured device graph is replayed, where the runtime can."
    )
    load: Literal["eager"] = _choice("eager", "eager", "When it is loaded: at start.")
    workers: Mapping[str, Count] = _choice(
        lambda: {"cpu": 1},
        "device name = 1 to 256",
        "Worker processes on each device.",
        min_length=1,
    )
    queue: Literal["shared", "per_worker"] = _choice(
        "shared", "shared, per_worker", "One queue that every worker takes from, or one for each, filled in turn."
    )
    max_queue_size: int = _number(256, 1, 1_000_000, "Requests accepted and not yet in a running batch.", "requests")
    max_queue_bytes: int = _number(256 << 20, 65_536, 1 << 40, "The same limit in bytes of tensors.", "bytes")
    max_queue_delay_us: int = _number(0, 0, 10_000_000, "How long an unfilled batch may wait for more rows.", "us")
    slots: int | None = _number(
        None, 2, 4096, "Batches that shared memory has room for.", shown="2 x max(workers, 2) + 2"
    )
    pad: Literal["zero", "repeat"] = _choice(
        "zero", "zero, repeat", "What fills the rows up to the batch size: zeros, or the last row again."
    )
    run_timeout_ms: int = _number(30_000, 1, DAY_MS, "A batch that takes longer means a hung worker.", "ms")
    load_timeout_ms: int = _number(60_000, 1, DAY_MS, "Longest time that loading may take.", "ms")
    fixed_input_buffers: bool = _choice(
        True, "true, false", "Whether every batch uses the same input memory; false makes arrays anew, without graphs."
    )
    threads: int = _number(1, 1, 1024, "Threads of one worker's runtime.")
    options: Mapping[str, Option] = _choice(
        dict, "name = string, number or boolean", "Passed on to the backend's runtime as they are."
    )

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str, info: ValidationInfo) -> str:
        if "\0" in path:
            raise ValueError("a path cannot hold a NUL character")
        return os.path.normpath(Path((info.context or {}).get("base", ".")) / path)

    @property
    def backend_name(self) -> str | None:
        """``backend``, or else the one for the file's suffix; None if that belongs to none."""
        return self.backend or BACKENDS.get(Path(self.path).suffix.lower())

    @property
    def worker_count(self) -> int:
        """Workers on all devices together."""
        return sum(self.workers.values())

    @property
    def slot_count(self) -> int:
        """``slots``, or two for each worker (of two at least) and two more."""
        return self.slots if self.slots is not None else 2 * max(self.worker_count, 2) + 2

    def spec(self, name: str, device: DeviceConfig) -> ModelSpec:
        """What a worker on ``device`` is told. Without fixed input buffers there is no graph."""
        backend = self.backend_name
        assert backend is not None  # cross_faults
        return ModelSpec(
            name=name,
            path=self.path,
            backend=backend,
            device_kind=device.kind,
            device_index=device.index,
            max_batch_size=self.max_batch_size,
            sizes=self.batch_sizes or default_sizes(self.max_batch_size),
            graph_sizes=self.graph_batch_sizes,
            dims=dict(self.dims),
            graph=self.graph if self.fixed_input_buffers else "off",
            fixed_input_buffers=self.fixed_input_buffers,
            threads=self.threads,
            options=dict(self.options),
        )


def _cpu() -> dict[str, DeviceConfig]:
    return {"cpu": DeviceConfig(kind="cpu")}


class Config(_Frozen):
    """A whole file. ``devices`` always has ``cpu``, which needs no table."""

    broker: BrokerConfig = Field(default_factory=BrokerConfig, description="")
    devices: Mapping[Name, DeviceConfig] = Field(default_factory=_cpu, description="")
    models: Mapping[Name, ModelConfig] = Field(min_length=1, description="")

    @field_validator("devices")
    @classmethod
    def _with_cpu(cls, devices: Mapping[str, DeviceConfig]) -> Mapping[str, DeviceConfig]:
        return {**_cpu(), **devices}


def build(tree: Mapping[str, Any], source: str, base: str | Path = ".") -> Config:
    """Check ``tree``, whose relative model paths start at ``base``; ``source`` names it in errors.

    Raises:
        ConfigInvalid: with one line for each fault. No other error leaves this function.
    """
    try:
        config = Config.model_validate(dict(tree), context={"base": base})
    except ValidationError as error:
        raise invalid(source, pydantic_faults(error, Config)) from None
    faults = cross_faults(config)
    if faults:
        raise invalid(source, faults)
    return config


def read(path: str | Path) -> Config:
    """Read and check a TOML file.

    Raises:
        ConfigInvalid: if it cannot be read, is not TOML, or holds something that ``build`` refuses.
    """
    try:
        tree = tomllib.loads(Path(path).read_bytes().decode())
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, f"not a TOML file: {error}") from None
    return build(tree, str(path), Path(path).absolute().parent)


def _unreadable(path: str | Path, reason: str) -> ConfigInvalid:
    return invalid(str(path), [Fault((), reason)])
