"""Which combination to use, and why: from the rows of a sweep alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CLOSE = 0.95  # of the best throughput counts as the same: two runs of one combination differ by that

Row = Mapping[str, Any]


def advise(rows: Sequence[Row]) -> dict[str, Any]:
    """``workers`` and ``graph`` of the setting to use (None without one), and ``why`` in sentences.

    Of those that answered the offered load without errors and in time, the highest saturated throughput decides;
    within CLOSE of it the fewest workers, and then a graph that is really replayed.
    """
    usable = [row for row in rows if not refusal(row)]
    left_out = [f"{label(row)} is left out: {reason}" for row in rows if (reason := refusal(row))]
    if not usable:
        return {"workers": None, "graph": None, "why": ["no combination can be recommended", *left_out]}
    best = max(usable, key=_rows_per_s)
    near = [row for row in usable if _rows_per_s(row) >= CLOSE * _rows_per_s(best)]
    chosen = min(near, key=lambda row: (row["workers"], _preference(row), -_rows_per_s(row)))
    why = [*_throughput(chosen, best, near), *_against(chosen, usable), *left_out, *_doubts(usable)]
    return {"workers": chosen["workers"], "graph": chosen["graph"], "why": why}


def label(row: Row) -> str:
    """``workers=2 graph=on``."""
    return f"workers={row['workers']} graph={row['graph']}"


def refusal(row: Row) -> str:
    """Why a row cannot be recommended; "" if it can."""
    if row["error"]:
        return str(row["error"])
    for name, phase in (("saturated", row["saturated"]), ("at the offered load", row["offered"])):
        if phase is None:
            return f"not measured {name}"
        if phase["errors"]:
            behind = "; the client fell behind its schedule and sent in bursts" if phase.get("fell_behind") else ""
            return f"{name}, errors: {', '.join(f'{code} {count}' for code, count in phase['errors'].items())}{behind}"
        if phase["restarts"]:
            return f"{name}, a worker died"
    offered = row["offered"]
    if not offered["kept_up"]:
        return f"it did not keep up with {offered['offered_per_s']:,.0f} requests/s"
    return ""


def _rows_per_s(row: Row) -> float:
    return float(row["saturated"]["rows_per_s"])


def _preference(row: Row) -> int:
    """A graph that is replayed, then none, then one that was wanted and is not there."""
    if row["graph_on"]:
        return 0
    return 1 if row["graph"] == "off" else 2


def _throughput(chosen: Row, best: Row, near: Sequence[Row]) -> Iterator[str]:
    rate = f"{label(chosen)} reached {_rows_per_s(chosen):,.0f} rows/s saturated"
    if chosen is best:
        yield f"{rate}, the most of all"
    else:
        yield f"{rate}, within {1 - CLOSE:.0%} of the most ({_rows_per_s(best):,.0f} with {label(best)})"
    if any(row["workers"] > chosen["workers"] for row in near):
        yield f"of the {len(near)} combinations within {1 - CLOSE:.0%} it has the fewest workers: less memory, less CPU"
    if chosen["graph"] == "on" and not chosen["graph_on"]:
        yield "graph = on changes nothing here: the workers have no graph"
    alike = [row for row in near if row["workers"] == chosen["workers"] and row is not chosen]
    if alike and not chosen["graph_on"]:
        yield "with as many workers, graph = on made no difference"


def _against(chosen: Row, usable: Sequence[Row]) -> Iterator[str]:
    """The same figures of the same graph with most workers, and of as many workers with the other graph."""
    alike = [row for row in usable if row["graph"] == chosen["graph"]]
    most = max(alike, key=lambda row: row["workers"])
    other = [row for row in usable if row["workers"] == chosen["workers"] and row["graph"] != chosen["graph"]]
    yield f"at {chosen['offered']['offered_per_s']:,.0f} requests/s {_load_words(chosen)}"
    for row in ([] if most is chosen else [most]) + other[:1]:
        yield f"{label(row)} at the same load: {_load_words(row)}; saturated {_rows_per_s(row):,.0f} rows/s"


def _load_words(row: Row) -> str:
    offered = row["offered"]
    cpu, run_us, queue_us = offered["cpu_percent"], offered["run_us"], offered["oldest_queue_us"]
    return (
        f"it takes {_number(cpu['mean'])} % of a core (p99 {_number(cpu['p99'])} %), "
        f"run_us {_number(run_us['p50'])} (p99 {_number(run_us['p99'])}), "
        f"oldest_queue_us {_number(queue_us['p50'])} (p99 {_number(queue_us['p99'])})"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _doubts(usable: Sequence[Row]) -> Iterator[str]:
    """What makes the figures weaker than they look."""
    bound = [label(row) for row in usable if row["saturated"]["client_bound"]]
    if bound:
        yield (
            f"in doubt: the client used a whole core, so that {', '.join(bound)} may be faster than measured: "
            "give more --clients, or more --rows"
        )
    busy = [label(row) for row in usable if row["saturated"]["machine_bound"]]
    if busy:
        yield f"in doubt: every core of this machine was busy, the client's share included, with {', '.join(busy)}"
    behind = [label(row) for row in usable if row["offered"]["fell_behind"]]
    if behind:
        yield (
            f"in doubt: the client fell behind its schedule with {', '.join(behind)}: "
            "give more --clients, or a lower --rate"
        )
