"""What a sweep is to measure, settled from flags and file before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxpool.cli import startup
from mxpool.cli.exits import BadSource
from mxpool.cli.sweep import axes, picture
from mxpool.cli.sweep.axes import Combination
from mxpool.config import Config

NOWHERE = "ipc:///tmp/mxpool-sweep/broker.sock"  # each broker gets its own; a config's endpoint may be in use


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What is sent for how long, with a sweep or without."""

    seconds: float
    in_flight: int
    rows: int
    npz: Path | None
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags that belong to a sweep alone, as they were given."""

    axes: Sequence[str] = ()
    config: Path | None = None
    model_path: Path | None = None
    rate: float | None = None
    clients: int | None = None
    csv: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One model on one device; ``rate`` None means one that every combination can answer."""

    config: Config
    model: str
    device: str
    combinations: tuple[Combination, ...]
    traffic: Traffic
    rate: float | None
    clients: int

    @property
    def kind(self) -> str:
        """The kind of the device."""
        return self.config.devices[self.device].kind


ARRIVALS_MAX = 10_000_000  # each client holds the times of its share, 8 bytes each


def plan(model: str, flags: Flags, traffic: Traffic, environ: Mapping[str, str]) -> Plan:
    """Read the config and combine the axes. ``model`` may be the first axis, where the config has one model only.

    Raises:
        ConfigInvalid: as ``startup``.
        BadSource: the model, an axis or a file for the results is not as allowed.
    """
    words = list(flags.axes)
    if "=" in model:  # no name has one
        words, model = [*words, model], ""
    config, name = _config(model, flags, environ)
    for path in (flags.csv, flags.plot):
        if path is not None:
            _check_writable(path)
    if flags.rate is not None and flags.rate * traffic.seconds > ARRIVALS_MAX:
        raise BadSource(f"--rate {flags.rate:g} for {traffic.seconds:g} s are more than {ARRIVALS_MAX:,} requests")
    if flags.plot is not None:
        picture.check_possible()
    table = config.models[name]
    device = next(iter(table.workers))
    return Plan(
        config=config,
        model=name,
        device=device,
        combinations=tuple(axes.combinations(words, Combination(table.workers[device], table.graph))),
        traffic=traffic,
        rate=flags.rate,
        clients=flags.clients or 1,
    )


def _check_writable(path: Path) -> None:
    """Refuse a file for the results that cannot be written: it would be found out when all is measured."""
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise BadSource(f"{path}: {error.strerror}") from None


def _config(model: str, flags: Flags, environ: Mapping[str, str]) -> tuple[Config, str]:
    """The config, and the name of the model in it."""
    if (flags.config is None) == (flags.model_path is None):
        raise BadSource("--sweep starts brokers of its own: give --config FILE or --model-path FILE, and not both")
    if flags.model_path is not None:
        name = model or "model"
        return startup.from_flags([f"{name}={flags.model_path}"], [], None, NOWHERE, environ), name
    assert flags.config is not None
    config = startup.from_file(flags.config, NOWHERE, environ)
    names = ", ".join(config.models)
    if not model and len(config.models) > 1:
        raise BadSource(f"{flags.config} has several models: name one of {names} before --sweep")
    name = model or next(iter(config.models))
    if name not in config.models:
        raise BadSource(f"no model named {name!r} in {flags.config}; there are: {names}")
    return config, name
