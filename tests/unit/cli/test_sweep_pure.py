"""What a sweep settles and works out without any process: axes, config file, schedule, figures, advice, outputs."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool import config as configs
from mxpool.cli.exits import BadSource
from mxpool.cli.surroundings import Surroundings
from mxpool.cli.sweep import figures, picture, report
from mxpool.cli.sweep.advice import advise, refusal
from mxpool.cli.sweep.axes import Combination, combinations
from mxpool.cli.sweep.clients import Load, added
from mxpool.cli.sweep.cpu_samples import rank
from mxpool.cli.sweep.open_loop import LATE_S, open_loop, schedule
from mxpool.cli.sweep.plan import Flags, Plan, Traffic, plan
from mxpool.cli.sweep.run import Sweep
from mxpool.cli.sweep.toml_text import to_toml, tree
from mxpool.errors import BrokerLost, QueueFull
from mxpool.histogram import Histogram, merged, percentile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESENT = Combination(3, "require")
TRAFFIC = Traffic(seconds=1, in_flight=1, rows=1, npz=None, timeout_s=1)


# Axes


def test_every_combination_comes_in_the_order_of_the_words() -> None:
    found = combinations(["workers=8,1", "graph=off,on"], PRESENT)
    assert [(each.workers, each.graph) for each in found] == [(8, "off"), (8, "on"), (1, "off"), (1, "on")]
    assert {each.setting for each in found} == {"off", "prefer"}
    assert combinations(["workers=8,1 graph=off,on"], PRESENT) == found


def test_an_axis_that_is_not_given_keeps_the_configs_value() -> None:
    assert combinations(["workers=2"], PRESENT) == [Combination(2, "require")]
    assert combinations(["graph=off"], PRESENT) == [Combination(3, "off")]


@pytest.mark.parametrize(
    "word",
    [
        "workers",
        "threads=1",
        "workers=",
        "workers=0",
        "workers=257",
        "workers=1,1",
        "workers=1,01",
        "workers=²",
        "graph=prefer",
        "=1",
    ],
)
def test_what_is_no_axis_is_refused_with_what_is_allowed(word: str) -> None:
    with pytest.raises(BadSource, match="workers"):
        combinations([word], PRESENT)


def test_an_axis_given_twice_is_refused() -> None:
    with pytest.raises(BadSource, match="workers is given twice"):
        combinations(["workers=1", "workers=2"], PRESENT)


# The config of one combination

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


@given(path=TEXTS, options=st.dictionaries(TEXTS, TEXTS | st.integers(-9, 9) | st.booleans() | st.floats(), max_size=3))
def test_a_config_file_says_the_same_as_its_tree(path: str, options: dict[str, Any]) -> None:
    made = {"broker": {"endpoint": "ipc:///x"}, "devices": {"gpu.0": {"kind": "cuda"}}, "models": {"m.1": {
        "path": path, "options": options, "dims": {"x": (1, 2)}}}}  # fmt: skip
    read = tomllib.loads(to_toml(made))
    assert json.dumps(read) == json.dumps(made)


def test_the_config_holds_the_one_model_with_all_its_keys_on_the_one_device() -> None:
    config = configs.build(
        {
            "broker": {"endpoint": "ipc:///run/mine.sock", "max_clients": 9},
            "devices": {"gpu0": {"kind": "cuda", "index": 2}},
            "models": {
                "a": {"path": "/m/a.onnx", "max_batch_size": 4, "dims": {"x": [3]}, "workers": {"gpu0": 1, "cpu": 2}},
                "b": {"path": "/m/b.onnx"},
            },
        },
        "test",
    )
    again = configs.build(
        tomllib.loads(to_toml(tree(config, "a", "gpu0", Combination(5, "off"), "ipc:///x/b.sock"))), "again"
    )
    expected = config.models["a"].model_copy(update={"workers": {"gpu0": 5}, "graph": "off"})
    assert dict(again.models) == {"a": expected}
    assert (again.broker.endpoints, again.broker.max_clients) == (("ipc:///x/b.sock",), 9)
    assert again.devices["gpu0"] == config.devices["gpu0"]


# Plans


def planned(tmp_path: Path, model: str, *axes: str, **flags: Any) -> Plan:
    file = tmp_path / "mx.toml"
    file.write_text('[models.a]\npath = "a.onnx"\nworkers = { cpu = 2 }\n' + flags.pop("more", ""))
    return plan(model, Flags(axes=axes, config=file, **flags), TRAFFIC, {})


def test_the_only_model_of_a_config_needs_no_name(tmp_path: Path) -> None:
    found = planned(tmp_path, "workers=1", "graph=off")
    assert (found.model, found.combinations) == ("a", (Combination(1, "off"),))


def test_a_model_that_is_not_there_or_not_named_is_told_with_the_names(tmp_path: Path) -> None:
    more = '[models.b]\npath = "b.onnx"\n'
    with pytest.raises(BadSource, match=r"no model named 'c' in .*: a, b"):
        planned(tmp_path, "c", more=more)
    with pytest.raises(BadSource, match="name one of a, b"):
        planned(tmp_path, "workers=1", more=more)


def test_where_no_result_can_be_written_nothing_is_started(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match="No such file or directory"):
        planned(tmp_path, "a", csv=tmp_path / "none" / "x.csv")
    with pytest.raises(BadSource, match="Is a directory"):
        planned(tmp_path, "a", csv=tmp_path)
    with pytest.raises(BadSource, match="more than 10,000,000 requests"):
        planned(tmp_path, "a", rate=1e12)


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(BadSource, match=r"pip install 'mxpool\[plot\]'"):
        picture.check_possible()


# The open loop


@given(rate=st.floats(0.5, 2000), seconds=st.floats(0.01, 3), seed=st.integers(0, 9))
def test_a_schedule_is_the_running_sum_of_exponential_gaps(rate: float, seconds: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    naive: list[float] = []
    while (due_s := (naive[-1] if naive else 0.0) + generator.exponential(1 / rate)) < seconds:
        naive.append(due_s)
    assert schedule(rate, seconds, seed) == pytest.approx(naive)


class Prompt:
    """Answers each request ``answer_s`` after it came, on a clock of its own; ``send_s`` is what sending takes."""

    def __init__(self, answer_s: float = 0.0, send_s: float = 0.0, failures: Mapping[int, Exception] | None = None):
        self.now_s, self.answer_s, self.send_s, self.failures = 0.0, answer_s, send_s, failures or {}
        self.sent_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds

    def submit(self, model: str, arrays: Mapping[str, Any], timeout_s: float = 30.0) -> Future[dict[str, Any]]:
        assert (model, dict(arrays), timeout_s) == ("m", {}, 1)
        self.sent_s.append(self.now_s)
        if (error := self.failures.get(len(self.sent_s) - 1)) is not None:
            raise error
        self.now_s += self.send_s
        future: Future[dict[str, Any]] = Future()
        future.set_result({})
        return future


def test_requests_go_at_their_times_whether_or_not_others_are_answered() -> None:
    client = Prompt()
    tally = open_loop(client, "m", [{}], [0.5, 0.75, 2.0], timeout_s=1, clock=client.clock, pause=client.pause)
    assert client.sent_s == [0.5, 0.75, 2.0]
    assert (tally.sent, tally.answered, tally.late) == (3, 3, 0)


def test_a_latency_runs_from_the_scheduled_time_and_late_sends_are_counted() -> None:
    client = Prompt(send_s=0.1)
    tally = open_loop(client, "m", [{}], [0.0, 0.01, 0.02], timeout_s=1, clock=client.clock, pause=client.pause)
    assert tally.late == 2
    assert percentile(tally.latency_us.to_wire(), 100) == pytest.approx(280_000, rel=1 / 32)
    assert LATE_S < 0.09


def test_a_refused_request_is_an_error_of_its_code_and_a_lost_broker_ends_it() -> None:
    full = QueueFull(model="m", depth=1, limit=1, unit="requests", retry_after_ms=1)
    client = Prompt(failures={1: full})
    tally = open_loop(client, "m", [{}], [0, 1, 2], timeout_s=1, clock=client.clock, pause=client.pause)
    assert (tally.answered, tally.failures) == (2, {"queue_full": 1})
    lost = Prompt(failures={0: BrokerLost(endpoint="ipc:///x", reason="gone")})
    with pytest.raises(BrokerLost):
        open_loop(lost, "m", [{}], [0], timeout_s=1, clock=lost.clock, pause=lost.pause)


# Figures


@given(st.lists(st.lists(st.integers(0, 10**7))))
def test_histograms_merge_to_the_histogram_of_all(parts: list[list[int]]) -> None:
    def wire(values: list[int]) -> list[list[int]]:
        histogram = Histogram()
        for value in values:
            histogram.add(value)
        return histogram.to_wire()

    assert merged(wire(part) for part in parts) == wire([value for part in parts for value in part])


@given(st.lists(st.floats(0, 100), min_size=1), st.integers(1, 100))
def test_a_rank_is_the_smallest_value_that_so_many_do_not_exceed(values: list[float], percent: int) -> None:
    found = rank(values, percent)
    enough = [each for each in values if sum(other <= each for other in values) * 100 >= percent * len(values)]
    assert found == min(enough)
    assert rank([], percent) is None


def test_loads_of_several_clients_add_up() -> None:
    one = {"sent": 10, "late": 1, "requests": 8, "rows": 16, "seconds": 2.0, "latency_us": [[5, 8]],
           "errors": {"queue_full": 2}, "cut_short": False}  # fmt: skip
    load = added([one, {**one, "seconds": 4.0, "cut_short": True}])
    assert (load.sent, load.late, load.requests, load.seconds, load.cut_short) == (20, 2, 16, 4.0, True)
    assert (load.requests_per_s, load.rows_per_s) == (6.0, 12.0)
    assert (load.latency_us, load.errors) == ([[5, 16]], {"queue_full": 4})


@pytest.mark.parametrize(
    ("load", "kept_up", "fell_behind"),
    [
        (Load(sent=100, requests=100, seconds=10.2), True, False),
        (Load(sent=100, requests=100, seconds=10.7), False, False),
        (Load(sent=100, requests=99, seconds=10.0, errors={"queue_full": 1}), False, False),
        (Load(sent=100, requests=100, seconds=10.0, late=11), True, True),
    ],
)
def test_a_load_was_kept_up_with_if_no_answers_were_left_over(load: Load, kept_up: bool, fell_behind: bool) -> None:
    found = figures.offered_figures(load, 10.0)
    assert (found["kept_up"], found["fell_behind"], found["offered_per_s"]) == (kept_up, fell_behind, 10.0)


def test_a_phase_counts_only_its_own_batches() -> None:
    def model(batches: int, rows: int, run: list[list[int]], hits: int) -> dict[str, Any]:
        times = {"run_us": {"buckets": run}, "oldest_queue_us": {"buckets": []}}
        graph = {"off": 0, "hit": hits, "miss": 0}
        return {"batches": batches, "batch_rows": rows, "graph": graph, "workers": [{"restarts": 1}], **times}

    found = figures.broker_figures(model(5, 10, [[100, 5]], 5), model(9, 26, [[100, 5], [900, 4]], 8))
    assert (found["batches"], found["rows_per_batch"], found["restarts"]) == (4, 4.0, 0)
    assert found["run_us"] == {"p50": 900, "p99": 900}
    assert found["oldest_queue_us"] == {"p50": None, "p99": None}
    assert found["graph"] == {"off": 0, "hit": 3, "miss": 0}


def test_cpu_is_told_by_part_and_a_client_or_machine_at_its_end_is_said() -> None:
    cores = {"broker": 0.4, "m-cpu-0": 0.3, "m-cpu-1": 0.3, "client-0": 0.95}
    found = figures.cpu_figures([90.0, 110.0], cores, ["client-0"], 2)
    assert found["cpu_percent"] == {"mean": 100.0, "p99": 110.0}
    assert found["cores"] == {"broker": 0.4, "workers": 0.6, "clients": 0.95}
    assert (found["client_bound"], found["machine_bound"]) == (True, True)
    assert not figures.cpu_figures([], {**cores, "client-0": 0.5}, ["client-0"], 4)["client_bound"]


# Advice


def row(workers: int, graph: str, rows_per_s: float, *, on: bool | None = None, **changes: Any) -> dict[str, Any]:
    both = {"errors": {}, "restarts": 0, "cpu_percent": {"mean": 20.0 * workers, "p99": 50.0}, "client_bound": False,
            "run_us": {"p50": 900, "p99": 950}, "oldest_queue_us": {"p50": 500, "p99": 900}, "machine_bound": False,
            "rows_per_s": rows_per_s, "requests_per_s": rows_per_s}  # fmt: skip
    offered = {**both, "offered_per_s": 1000.0, "kept_up": True, "fell_behind": False, "rows_per_s": 1000.0}
    saturated = both | changes.pop("saturated", {})
    told: dict[str, Any] = {"workers": workers, "graph": graph, "graph_on": graph == "on" if on is None else on}
    told |= {"notes": [], "error": None, "memory": {"resident_bytes": 1 << 20}, "saturated": saturated}
    return {**told, "offered": offered | changes.pop("offered", {}), **changes}


def chosen(*rows: dict[str, Any]) -> tuple[int, str]:
    found = advise(rows)
    return found["workers"], found["graph"]


def test_the_highest_throughput_is_recommended_and_within_5_percent_the_fewest_workers() -> None:
    assert chosen(row(4, "on", 900), row(2, "on", 1000), row(1, "on", 500)) == (2, "on")
    assert chosen(row(4, "on", 1000), row(2, "on", 960), row(1, "on", 940)) == (2, "on")


def test_a_graph_is_preferred_only_if_it_is_really_replayed() -> None:
    assert chosen(row(2, "off", 1000), row(2, "on", 970)) == (2, "on")
    assert chosen(row(2, "on", 1000, on=False), row(2, "off", 970)) == (2, "off")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"error": "does not fit"}, "does not fit"),
        ({"offered": {"kept_up": False}}, "did not keep up with 1,000"),
        ({"offered": {"errors": {"queue_full": 3}}}, "queue_full 3"),
        ({"offered": {"errors": {"queue_full": 3}, "fell_behind": True}}, "queue_full 3; the client fell behind"),
        ({"saturated": {"restarts": 1}}, "a worker died"),
    ],
)
def test_what_failed_or_fell_behind_is_left_out_with_the_reason(changes: dict[str, Any], word: str) -> None:
    rows = [row(4, "off", 2000, **changes), row(2, "off", 1000)]
    assert chosen(*rows) == (2, "off")
    assert any(word in reason for reason in advise(rows)["why"])
    assert advise(rows[:1])["workers"] is None


def test_a_combination_that_was_not_measured_is_refused() -> None:
    assert refusal(row(1, "off", 1) | {"offered": None}) == "not measured at the offered load"


def test_the_reasons_have_the_figures_and_the_doubts() -> None:
    rows = [row(8, "on", 1000, saturated={"client_bound": True}), row(2, "on", 990, offered={"fell_behind": True}),
            row(2, "off", 300, saturated={"machine_bound": True})]  # fmt: skip
    why = "\n".join(advise(rows)["why"])
    for words in ("990 rows/s", "40 % of a core", "160 % of a core", "300 rows/s", "--clients", "fell behind"):
        assert words in why
    assert "every core of this machine was busy" in why
    assert "the workers have no graph" in "".join(advise([row(1, "on", 9, on=False)])["why"])


@pytest.mark.parametrize(("clients", "rate"), [(1, 5000.0), (2, 8000.0)])
def test_no_more_is_offered_than_the_clients_can_send_on_time(tmp_path: Path, clients: int, rate: float) -> None:
    said: list[str] = []
    sweep = Sweep(planned(tmp_path, "a", clients=clients), Surroundings(), said.append)
    assert sweep._common_rate(10_000.0) == rate
    assert [("offering 5,000 requests/s, not 8,000" in line) for line in said] == [True] * (clients == 1)


# Outputs

TOLD: dict[str, Any] = {
    "model": "m",
    "device": "gpu0",
    "rate": 1000.0,
    "combinations": [
        row(2, "on", 1000),
        row(1, "on", 500, on=False, notes=["not captured"]),
        row(1, "off", 400),
    ],
}
FAILED = {**row(8, "off", 0), "error": "no room", "saturated": None, "offered": None, "memory": {}}


def test_the_csv_has_a_line_for_each_combination_and_phase(tmp_path: Path) -> None:
    report.write_csv(tmp_path / "s.csv", [row(2, "on", 1000), FAILED])
    with (tmp_path / "s.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["workers"], line["phase"]) for line in lines] == [
        ("2", "saturated"), ("2", "offered"), ("8", "saturated"), ("8", "offered")]  # fmt: skip
    assert (lines[0]["rows_per_s"], lines[0]["run_us.p99"], lines[0]["errors"]) == ("1000", "950", "0")
    assert (lines[1]["offered_per_s"], lines[1]["kept_up"]) == ("1000.0", "True")
    assert (lines[2]["error"], lines[2]["rows_per_s"]) == ("no room", "")


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    rows = [*TOLD["combinations"], FAILED]
    picture.write(tmp_path / "s.png", {**TOLD, "combinations": rows})
    data = (tmp_path / "s.png").read_bytes()
    assert (data[:8], len(data) > 10_000) == (b"\x89PNG\r\n\x1a\n", True)


def test_the_tables_have_units_a_graph_that_is_not_there_and_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*TOLD["combinations"], FAILED]
    report.show({**TOLD, "combinations": rows, "recommended": advise(rows)})
    shown = capsys.readouterr().out
    for words in (
        "saturated",
        "1,000.0 requests/s offered",
        "on (off)",
        "workers=8 graph=off: no room",
        "not captured",
    ):
        assert words in shown
    assert "recommended: workers = 2, graph = on" in shown
