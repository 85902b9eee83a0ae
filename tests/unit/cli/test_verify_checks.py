"""Each check finds the fault that it is there for, and passes a model without one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from verified_model import LEARNED, MODEL, PLAIN, Answer, Call, VerifiedModel, right

from mxpool.cli.surroundings import Arrays
from mxpool.cli.verify import consecutive, coupling, crowd, every_slot, on_off
from mxpool.cli.verify.difference import Noise
from mxpool.cli.verify.outcome import Outcome, Result
from mxpool.errors import RunFailed, WorkerDied
from mxpool.tensors import Signature, TensorSpec

NARROW = Signature((TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", (4,)),), 1)
SINGLE = Signature((TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", (4,)),), 0)


class Stale:
    """Answers ``model``, once in ``every`` requests, with what the request before it got."""

    def __init__(self, model: str = MODEL, every: int = 5) -> None:
        self._model, self._every = model, every
        self._last: dict[int, Arrays] = {}

    def __call__(self, call: Call) -> Arrays:
        rows, answer = len(call.arrays["x"]), right(call)
        last = self._last.get(rows, answer)
        self._last[rows] = answer
        return last if call.model == self._model and call.number % self._every == 0 else answer


def wrong_at(rows: int, amount: float = 0.5) -> Answer:
    """One element is off in the served model's answers to requests of ``rows`` rows."""

    def answer(call: Call) -> Arrays:
        found = right(call)
        if call.model == MODEL and len(call.arrays["x"]) == rows:
            found["y"][rows - 1, 2] += amount
        return found

    return answer


def mixed_up(call: Call) -> Arrays:
    """With others under way, an answer's first two rows are each other's."""
    found = right(call)
    if call.at_once > 1 and len(found["y"]) > 1:
        found["y"][[0, 1]] = found["y"][[1, 0]]
    return found


def coupled(call: Call) -> Arrays:
    """Each row depends on the largest value of its batch."""
    return {"y": call.arrays["x"] / call.arrays["x"].max()}


def noisy(amount: float) -> Answer:
    """Every run is off by up to ``amount`` of a value."""
    random = np.random.default_rng(7)
    return lambda call: {"y": right(call)["y"] + random.random(call.arrays["x"].shape, np.float32) * np.float32(amount)}


def always_first() -> Answer:
    """Every answer of the served model is the first one, cut to its rows: a replay that ignores its input."""
    first = np.ones((16, 4), np.float32)
    return lambda call: {"y": first[: len(call.arrays["x"])]} if call.model == MODEL else right(call)


def repeat(model: VerifiedModel) -> Outcome:
    return consecutive.check_repeat(model.asked(), model.material())


def in_a_row(model: VerifiedModel) -> Outcome:
    return consecutive.check(model.asked(), None, model.material())


def beside_plain(model: VerifiedModel) -> Outcome:
    return consecutive.check(model.asked(), model.plain(), model.material())


def slots(model: VerifiedModel) -> Outcome:
    return every_slot.check(model.asked(), model.material())


def coupling_of(model: VerifiedModel) -> Outcome:
    return coupling.check(model.asked(), model.material())


def crowded(model: VerifiedModel) -> Outcome:
    return crowd.check(model.asked(), model.material(), 3)


CHECKS = [repeat, in_a_row, beside_plain, slots, coupling_of, crowded]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("signature", [None, NARROW, SINGLE])
def test_a_model_without_a_fault_passes(check: Callable[[VerifiedModel], Outcome], signature: Signature | None) -> None:
    model = VerifiedModel() if signature is None else VerifiedModel(signature=signature)
    outcome = check(model)
    skipped = signature is not None and check is coupling_of
    assert outcome.result is (Result.SKIPPED if skipped else Result.OK), outcome


@pytest.mark.parametrize(
    ("check", "answer", "told"),
    [
        (repeat, noisy(0.5), "random operators, or wrong answers"),
        (in_a_row, Stale(), "others the second time: input"),
        (beside_plain, Stale(), "others the second time"),
        (beside_plain, always_first(), "not the plain worker's"),
        (beside_plain, wrong_at(7), "not the plain worker's"),
        (slots, mixed_up, "not those of the request alone: request 0"),
        (slots, Stale(every=3), "not those of the request alone"),
        (crowded, mixed_up, "rows"),
        (crowded, Stale(every=7), "wrong one: block"),
    ],
)
def test_a_fault_is_found_and_described(check: Callable[[VerifiedModel], Outcome], answer: Answer, told: str) -> None:
    outcome = check(VerifiedModel(answer))
    assert outcome.result is Result.FAILED, outcome
    assert told in outcome.detail


def test_answers_that_differ_by_rounding_from_run_to_run_are_a_note_and_excuse_as_much_later() -> None:
    model = VerifiedModel(noisy(1e-5))
    asked = model.asked()
    assert consecutive.check_repeat(asked, model.material()).result is Result.NOTE
    assert 0 < asked.noise.relative < 1e-4
    assert consecutive.check(asked, None, model.material()).result is Result.OK


def by_size(amount: float) -> Answer:
    """Kernels of another size compute something else: answers are off by ``amount`` of a request of few rows."""

    def answer(call: Call) -> Arrays:
        small = len(call.arrays["x"]) < 16
        return {"y": right(call)["y"] * np.float32(1 + amount * small)}

    return answer


@pytest.mark.parametrize(("amount", "result"), [(1e-3, Result.OK), (0.05, Result.FAILED)])
def test_what_a_batch_size_computes_is_known_of_each_row_within_reason(amount: float, result: Result) -> None:
    """TF32 is off by 1e-3 from size to size; a graph that is wrong at one size is off by more than that."""
    assert crowded(VerifiedModel(by_size(amount))).result is result


def test_an_answer_that_no_batch_size_computes_is_wrong_however_near_it_is() -> None:
    """Off by as much as the sizes are from each other, but only while others are under way."""

    def answer(call: Call) -> Arrays:
        off = np.float32(1 + 1e-3 * (call.at_once > 1))
        return {"y": by_size(-1e-3)(call)["y"] * off if len(call.arrays["x"]) == 16 else right(call)["y"] * off}

    assert crowded(VerifiedModel(answer)).result is Result.FAILED


def test_a_model_that_says_the_same_to_everything_is_a_note_unless_the_plain_worker_agrees() -> None:
    model = VerifiedModel(lambda call: {"y": np.ones_like(call.arrays["x"])})
    alone, beside = in_a_row(model), beside_plain(model)
    assert (alone.result, beside.result) == (Result.NOTE, Result.OK)
    assert "or answers are stale; try real rows with --npz" in alone.detail
    assert "insensitive" in beside.detail


def test_clients_that_are_refused_are_no_answers() -> None:
    model = VerifiedModel(connections_max=1)
    outcome = crowd.check(model.asked(), model.material(), 3)
    assert outcome.result is Result.FAILED
    assert "too many clients" in outcome.detail


def test_the_comparison_goes_on_while_the_only_worker_is_started_again() -> None:
    model = VerifiedModel(graph=True, workers=0)
    assert [one.result for one in on_off.check(model.asked(), model.plain(), model.material())][:2] == [Result.OK] * 2


def test_sizes_change_between_consecutive_requests() -> None:
    sent: list[int] = []

    def answer(call: Call) -> Arrays:
        sent.append(len(call.arrays["x"]))
        return right(call)

    in_a_row(VerifiedModel(answer))
    assert sent[:5] == [1, 16, 7, 16, 1]
    assert sent == sent[:100] + sent[:100][::-1]


# Graph on and off


def on_off_rows(model: VerifiedModel) -> dict[str, Outcome]:
    found = on_off.check(model.asked(), model.plain(), model.material())
    return {outcome.compared.split(",", maxsplit=1)[0]: outcome for outcome in found}


def test_row_counts_are_those_of_the_check_list_the_ends_and_every_captured_size() -> None:
    assert on_off.row_counts(128, [1, 8, 32, 128]) == [1, 8, 32, 64, 127, 128]
    assert on_off.row_counts(16, [1, 8, 16]) == [1, 8, 15, 16]
    assert on_off.row_counts(256, []) == [1, 32, 64, 127, 128, 255, 256]
    assert on_off.row_counts(1, [1]) == [1]


def test_equal_answers_pass_at_every_size() -> None:
    found = on_off_rows(VerifiedModel(graph=True))
    assert list(found) == ["1 rows", "8 rows", "15 rows", "16 rows", "batches counted as hit"]
    assert {outcome.result for outcome in found.values()} == {Result.OK}
    assert found["8 rows"].detail == "bit-equal"


@pytest.mark.parametrize("rows", [1, 8, 15, 16])
def test_a_single_element_that_is_wrong_at_one_size_is_found_there_and_named(rows: int) -> None:
    found = on_off_rows(VerifiedModel(wrong_at(rows, 1e-3), graph=True))
    failed = [name for name, outcome in found.items() if outcome.result is Result.FAILED]
    assert failed == [f"{rows} rows"]
    assert f"in 'y', row {rows - 1}, element 2; more than what runs of the plain worker differ by" in (
        found[failed[0]].detail
    )
    assert found[failed[0]].figures["largest_difference"] == pytest.approx(1e-3, rel=0.01)


def test_what_plain_runs_differ_by_is_no_failure_and_is_said() -> None:
    found = on_off_rows(VerifiedModel(noisy(1e-3), graph=True))
    assert {outcome.result for outcome in found.values()} == {Result.OK}
    assert "within what runs of the plain worker differ by" in found["16 rows"].detail


def test_a_graph_that_is_said_to_be_on_and_never_replays_fails() -> None:
    found = on_off_rows(VerifiedModel(graph=True, replays=False))
    assert found["batches counted as hit"].result is Result.FAILED


# Slots, clients, coupling


def test_slots_that_were_never_used_are_a_note_that_names_them() -> None:
    outcome = slots(VerifiedModel(resting=[9]))
    assert outcome.result is Result.NOTE
    assert "slots 9 were never used" in outcome.detail


def test_more_full_requests_than_slots_are_under_way_at_once() -> None:
    at_once: list[int] = []

    def answer(call: Call) -> Arrays:
        at_once.append(call.at_once)
        return right(call)

    slots(VerifiedModel(answer, slots=6))
    assert max(at_once) == 12


def test_slots_that_hold_more_than_is_kept_have_different_data_all_the_same() -> None:
    large = Signature((TensorSpec("x", "FP32", (2_000_000,)),), (TensorSpec("y", "FP32", (1,)),), 2)
    first: set[float] = set()

    def answer(call: Call) -> Arrays:
        if call.at_once > 1:
            first.add(float(call.arrays["x"][0, 0]))
        return {"y": call.arrays["x"][:, :1] * 2}

    outcome = slots(VerifiedModel(answer, large, slots=7))
    assert outcome.result is Result.OK, outcome
    assert len(first) == 7
    assert outcome.figures["requests"] == 14


def test_a_worker_that_took_no_part_is_named() -> None:
    outcome = crowded(VerifiedModel(workers=3, busy=2))
    assert outcome.result is Result.NOTE
    assert "no batch went to r-2" in outcome.detail


def test_an_error_of_one_client_fails_the_check_with_its_code() -> None:
    def answer(call: Call) -> Arrays:
        if call.number == LEARNED + 50:
            raise WorkerDied(worker="r-0", model=MODEL)
        return right(call)

    outcome = crowded(VerifiedModel(answer))
    assert outcome.result is Result.FAILED
    assert "worker_died" in outcome.detail


def test_answers_that_are_all_alike_cannot_be_told_from_one_another() -> None:
    outcome = crowded(VerifiedModel(lambda call: {"y": np.ones_like(call.arrays["x"])}))
    assert outcome.result is Result.NOTE
    assert "mixed-up rows would not be seen" in outcome.detail


def test_coupled_rows_are_a_loud_note_and_whole_blocks_are_sent_from_then_on() -> None:
    model = VerifiedModel(coupled)
    asked = model.asked()
    outcome = coupling.check(asked, model.material())
    assert outcome.result is Result.NOTE
    assert outcome.detail.startswith("ROWS ARE COUPLED: answers depend on neighbours or padding by up to")
    assert "neighbours 100 times larger" in outcome.detail
    assert asked.coupled
    told = crowd.check(asked, model.material(), 2)
    assert told.result is Result.OK
    assert "full blocks (rows are coupled)" in told.compared


def test_rows_that_differ_only_at_another_size_are_a_note_of_their_own() -> None:
    def answer(call: Call) -> Arrays:
        return {"y": right(call)["y"] + np.float32(0.01 * (len(call.arrays["x"]) < 8))}

    outcome = coupling_of(VerifiedModel(answer))
    assert outcome.result is Result.NOTE
    assert outcome.detail.startswith("rows are independent: bit-equal at the same padded size; alone, at another")
    assert "BY MORE THAN ROUNDING" in outcome.detail


def test_a_model_that_cannot_take_large_values_is_compared_without_them() -> None:
    def answer(call: Call) -> Arrays:
        if call.arrays["x"].max() > 1:
            raise RunFailed(model=MODEL, reason="index out of range")
        return right(call)

    outcome = coupling_of(VerifiedModel(answer))
    assert outcome.result is Result.OK
    assert "the model fails with neighbours 100 times larger" in outcome.detail


def test_noise_allows_twice_what_two_runs_differ_by() -> None:
    model = VerifiedModel(noisy(0.01))
    asked = model.plain()
    noise = asked.measure(model.material().request(16))
    assert isinstance(noise, Noise)
    assert 0 < noise.relative < 0.01
    assert model.ran == {PLAIN: 3}
