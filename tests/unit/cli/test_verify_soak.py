from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verified_model import LEARNED, MODEL, Answer, Call, VerifiedModel, right

from mxpool.cli.surroundings import Arrays
from mxpool.cli.verify.outcome import Outcome, Result
from mxpool.cli.verify.soak import Gauges, Soak
from mxpool.cli.verify.trend import MIB, growth, rise
from mxpool.errors import BrokerLost, QueueFull

FULL = QueueFull(model=MODEL, depth=1, limit=1, unit="requests", retry_after_ms=1)


class Clock:
    """Each look takes a while."""

    def __init__(self, step_s: float = 0.05) -> None:
        self.now_s, self._step_s = 100.0, step_s

    def __call__(self) -> float:
        self.now_s += self._step_s
        return self.now_s


def soaked(
    model: VerifiedModel,
    *,
    resident: Callable[[float], int] = lambda _: 200 * MIB,
    device: Callable[[float], int | None] = lambda _: None,
    seconds: float = 100.0,
) -> tuple[Soak, dict[str, Outcome]]:
    clock = Clock()
    gauges = Gauges(
        clock=clock, resident=lambda _: resident(clock.now_s - 100), device=lambda: device(clock.now_s - 100)
    )
    soak = Soak(model.asked(), model.material(), gauges, seconds)
    return soak, {outcome.check: outcome for outcome in soak.run()}


def test_a_quiet_soak_passes_and_is_sampled_ten_times() -> None:
    soak, found = soaked(VerifiedModel())
    assert {outcome.result for outcome in found.values()} == {Result.OK}
    assert len(soak.samples) in (11, 12)
    assert sum(sample.answered for sample in soak.samples) == found["soak answers"].figures["answers"] > 100
    assert {sample.run_us_p99 for sample in soak.samples[1:]} == {503}
    assert "flat" in found["soak run_us p99"].detail


def failing(number: int) -> Answer:
    def answer(call: Call) -> Arrays:
        if call.number == number:
            raise FULL
        return right(call)

    return answer


def test_one_error_fails_it_and_the_load_goes_on() -> None:
    soak, found = soaked(VerifiedModel(failing(LEARNED + 50)))
    told = found["soak answers"]
    assert told.result is Result.FAILED
    assert told.figures["errors"] == {"queue_full": 1}
    assert told.figures["answers"] > 100
    assert sum(sample.errors for sample in soak.samples) == 1


def test_one_wrong_answer_fails_it() -> None:
    def answer(call: Call) -> Arrays:
        found = right(call)
        found["y"][0, 0] += call.number == LEARNED + 50
        return found

    _, found = soaked(VerifiedModel(answer))
    assert (found["soak answers"].result, found["soak answers"].figures["wrong"]) == (Result.FAILED, 1)


def test_a_broker_that_refuses_everything_is_not_asked_for_ever() -> None:
    def answer(call: Call) -> Arrays:
        if call.number > LEARNED + 10:
            raise FULL
        return right(call)

    _, found = soaked(VerifiedModel(answer), seconds=1e6)
    assert found["soak answers"].figures["errors"] == {"queue_full": 100}


def test_a_broker_that_is_gone_ends_it() -> None:
    def answer(call: Call) -> Arrays:
        if call.number > LEARNED + 10:
            raise BrokerLost(endpoint="ipc:///x", reason="gone")
        return right(call)

    with pytest.raises(BrokerLost):
        soaked(VerifiedModel(answer))


def test_a_worker_that_was_started_again_fails_it() -> None:
    class Restarting(VerifiedModel):
        def status(self) -> dict[str, object]:
            found = super().status()
            found["models"][MODEL]["workers"][0]["restarts"] = int(self.calls > LEARNED + 100)
            return found

    _, found = soaked(Restarting())
    assert (found["soak answers"].result, found["soak answers"].figures["restarts"]) == (Result.FAILED, 1)


@pytest.mark.parametrize("where", ["resident", "device"])
def test_memory_that_grows_fails_it(where: str) -> None:
    def growing(at_s: float) -> int:
        return 200 * MIB + int(at_s * MIB)

    model = VerifiedModel()
    _, found = soaked(model, resident=growing) if where == "resident" else soaked(model, device=growing)
    assert found["soak memory"].result is Result.FAILED


def test_a_run_time_that_rises_fails_it_and_is_named() -> None:
    _, found = soaked(VerifiedModel(run_us=lambda calls: 1000 + calls))
    assert found["soak run_us p99"].result is Result.FAILED
    assert "RISING" in found["soak run_us p99"].detail
    assert found["soak answers"].result is Result.OK


def test_growth_is_judged_from_first_to_last_by_both_limits() -> None:
    assert growth([]) == (0, False)
    assert growth([100 * MIB, 900 * MIB, 120 * MIB]) == (20 * MIB, False), "less than 32 MiB"
    assert growth([1000 * MIB, 1040 * MIB]) == (40 * MIB, False), "less than 5 %"
    assert growth([100 * MIB, 140 * MIB]) == (40 * MIB, True)


@given(st.lists(st.floats(990, 1010), min_size=2, max_size=20), st.integers(0, 19))
def test_noise_and_one_outlier_are_no_trend(values: list[float], spike: int) -> None:
    noisy = [9000.0 if index == spike else value for index, value in enumerate(values)]
    assert rise([*enumerate(map(float, noisy))])[1] is False


def test_a_steady_rise_is_one_only_over_the_limits_and_with_enough_samples() -> None:
    part, rising = rise([(float(at), 1000.0 + 100 * at) for at in range(10)])
    assert part == pytest.approx(900 / 1450)
    assert rising
    assert not rise([(float(at), 1000.0 + 10 * at) for at in range(10)])[1], "9 %"
    assert not rise([(float(at), 100.0 + 20 * at) for at in range(10)])[1], "180 us"
    assert not rise([(float(at), 1000.0 + 100 * at) for at in range(7)])[1], "seven samples"
    assert rise([]) == (0.0, False)
