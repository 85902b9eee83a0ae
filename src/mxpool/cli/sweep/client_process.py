"""One client process of a sweep: reads what to do as lines of JSON, answers each with a line, ends with its stdin.

The first line says whom to ask and with what; it is answered once a request has come back. Each other line is a load::

    {"endpoint": "ipc:///...", "model": "ranking", "rows": 1, "npz": null, "seed": 0, "timeout_s": 30}
    {"in_flight": 256, "seconds": 5}
    {"rate": 1000.0, "seconds": 5, "seed": 7}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from mxpool import Client
from mxpool.cli import sources
from mxpool.cli.closed_loop import closed_loop, random_blocks
from mxpool.cli.exits import BadSource
from mxpool.cli.surroundings import Arrays, rows_of
from mxpool.cli.sweep.open_loop import open_loop, schedule
from mxpool.errors import MxPoolError
from mxpool.histogram import Histogram
from mxpool.tensors import Signature


def main() -> None:
    """Answer lines until stdin ends."""
    setup = json.loads(sys.stdin.readline())
    with closing(Client(setup["endpoint"])) as client:
        try:
            signature = Signature.from_wire(client.metadata(setup["model"]))
            blocks = _blocks(signature, setup)
            rows = rows_of(blocks[0], batched=signature.batched)
            client.infer(setup["model"], blocks[0], setup["timeout_s"])
            _tell({"rows": rows})
            for line in sys.stdin:
                _tell(_load(client, setup, blocks, rows, json.loads(line)))
        except MxPoolError as error:
            _tell({"error": f"{error.code}: {error}"})
        except BadSource as error:
            _tell({"error": str(error)})


def _tell(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _blocks(signature: Signature, setup: Mapping[str, Any]) -> list[Arrays]:
    if setup["npz"]:
        path = Path(setup["npz"])
        return [sources.load_arrays(path, path.stem)]
    return random_blocks(signature, setup["rows"], setup["seed"])


def _load(
    client: Client, setup: Mapping[str, Any], blocks: list[Arrays], rows: int, load: Mapping[str, Any]
) -> dict[str, Any]:
    """One run; see ``clients.Load`` for the figures."""
    model, timeout_s, seconds = setup["model"], setup["timeout_s"], load["seconds"]
    if "rate" in load:
        times_s = schedule(load["rate"], seconds, load["seed"])
        opened = open_loop(client, model, blocks, times_s, timeout_s=timeout_s)
        latency_us, counts = opened.latency_us, {"sent": opened.sent, "late": opened.late, "requests": opened.answered}
        failures, elapsed_s, cut_short = opened.failures, opened.elapsed_s, False
    else:
        closed = closed_loop(client, model, blocks, in_flight=load["in_flight"], seconds=seconds, timeout_s=timeout_s)
        latency_us = Histogram()
        for latency_s in closed.latencies_s:
            latency_us.add(int(latency_s * 1e6))
        count = len(closed.latencies_s)
        counts = {"sent": count + closed.failures.total(), "late": 0, "requests": count}
        failures, elapsed_s, cut_short = closed.failures, closed.elapsed_s, closed.cut_short
    return {
        **counts,
        "rows": counts["requests"] * rows,
        "seconds": elapsed_s,
        "latency_us": latency_us.to_wire(),
        "errors": dict(failures),
        "cut_short": cut_short,
    }
