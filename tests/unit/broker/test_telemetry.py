from __future__ import annotations

from collections import deque

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from mxpool.broker.telemetry import OUTCOMES, RECENT_BATCHES, BatchRecord, ModelCounters, percentiles

RECORD = BatchRecord("ranking", "ranking-gpu0-0", 3, 5, 8, 900, 400, 2, 120, 30, 7, "hit", "idle")


def test_a_record_reads_as_one_line_with_the_documented_names() -> None:
    assert str(RECORD) == (
        "model=ranking worker=ranking-gpu0-0 slot_count=3 batch_samples=5 padded_batch=8 oldest_queue_us=900 "
        "avg_queue_us=400 merge_us=2 run_us=120 split_us=30 queue_depth=7 graph=hit close=idle"
    )


def test_live_dead_and_padding_rows_add_up_to_the_rows_that_ran() -> None:
    counters = ModelCounters()
    counters.batch(RECORD, 6)
    counters.batch(RECORD, 5)
    assert (counters.batches, counters.batch_rows, counters.dead_rows, counters.padding_rows) == (2, 10, 1, 5)
    assert counters.batch_rows + counters.dead_rows + counters.padding_rows == 2 * RECORD.padded_batch
    assert (counters.close["idle"], counters.graph["hit"]) == (2, 2)


def test_a_batch_that_failed_is_no_hit_no_miss_and_not_off() -> None:
    counters = ModelCounters()
    counters.batch(RECORD, 6, failed=True)
    assert (counters.batches, counters.graph) == (1, {"hit": 0, "miss": 0, "off": 0})


def test_stats_can_be_packed_and_hold_every_outcome_from_the_start() -> None:
    counters = ModelCounters()
    empty = counters.to_wire()
    assert {name: empty[name] for name in OUTCOMES} == dict.fromkeys(OUTCOMES, 0)
    assert (empty["last_batch"], empty["run_us"]) == (None, {"buckets": []})
    counters.batch(RECORD, 6)
    full = msgpack.unpackb(msgpack.packb(counters.to_wire()))
    assert full["last_batch"]["oldest_queue_us"] == 900
    assert full["run_us"] == {"p50": 120, "p99": 120, "buckets": [[121, 1]]}
    assert full["oldest_queue_us"] == {"p50": 900, "p99": 900, "buckets": [[911, 1]]}
    assert set(full["close"]) == {"full", "delay", "idle", "drain", "retry"}


def test_two_models_do_not_share_counters() -> None:
    first, second = ModelCounters(), ModelCounters()
    first.outcomes["ok"] += 1
    first.batch(RECORD, 6)
    assert (second.outcomes["ok"], second.close["idle"], len(second.recent_run_us)) == (0, 0, 0)


def test_percentiles_look_back_on_a_bounded_number_of_batches() -> None:
    counters = ModelCounters()
    for _ in range(RECENT_BATCHES + 10):
        counters.batch(RECORD, 6)
    assert len(counters.recent_run_us) == RECENT_BATCHES


def test_one_slow_batch_in_two_hundred_is_above_p99() -> None:
    assert percentiles(deque([*range(199), 10**6])) == {"p50": 100, "p99": 198}


@given(values=st.lists(st.integers(0, 1000), min_size=1, max_size=300))
def test_half_of_the_values_are_at_most_p50_and_ninety_nine_in_a_hundred_at_most_p99(values: list[int]) -> None:
    found = percentiles(deque(values))
    assert set(found.values()) <= set(values)
    assert 2 * sum(value <= found["p50"] for value in values) >= len(values)
    assert 2 * sum(value >= found["p50"] for value in values) >= len(values)
    assert 100 * sum(value <= found["p99"] for value in values) >= 99 * len(values)
    assert 100 * sum(value >= found["p99"] for value in values) >= len(values)
