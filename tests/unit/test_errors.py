from __future__ import annotations

import string

import pytest

from mxpool import errors
from mxpool.errors import BY_CODE, MxPoolError, QueueFull, from_wire


def drawn_tree() -> dict[str, str]:
    """Class to parent class, as the module's docstring draws them."""
    parents: dict[str, str] = {}
    path: list[str] = []
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines():
        name = line.lstrip(" │├└─").split(" ")[0]
        if not hasattr(errors, name) or not isinstance(getattr(errors, name), type):
            continue
        depth = (line.index(name) - 4) // 4
        path[depth:] = [name]
        if depth:
            parents[name] = path[depth - 1]
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    classes = {error.__name__: error.__bases__[0].__name__ for error in BY_CODE.values() if error is not MxPoolError}
    assert drawn_tree() == classes


def test_codes_are_unique_and_plain() -> None:
    def below(error: type[MxPoolError]) -> list[type[MxPoolError]]:
        return [error, *(found for child in error.__subclasses__() for found in below(child))]

    codes = [error.code for error in below(MxPoolError)]
    assert len(codes) == len(set(codes)) == len(BY_CODE)
    assert all(set(code) <= {*string.ascii_lowercase, "_"} for code in codes)


@pytest.mark.parametrize("error", BY_CODE.values(), ids=lambda error: error.__name__)
def test_every_error_crosses_the_wire_as_itself(error: type[MxPoolError]) -> None:
    names = [name for _, name, _, _ in string.Formatter().parse(error.template) if name]
    raised = error(**{name: 1.0 if name == "timeout_s" else f"<{name}>" for name in names})
    assert all(str(value) in raised.message or name == "timeout_s" for name, value in raised.fields.items())
    again = from_wire(raised.code, raised.message, raised.fields)
    assert (type(again), again.message, again.fields) == (error, raised.message, raised.fields)
    assert again.retryable == error.retryable


def test_an_unknown_code_becomes_the_base_error_and_keeps_its_code() -> None:
    error = from_wire("from_the_future", "text", {"a": 1})
    assert type(error) is MxPoolError
    assert error.message == "text"
    assert error.fields == {"code": "from_the_future", "a": 1}
    assert not error.retryable


def test_only_what_may_succeed_later_unchanged_is_retryable() -> None:
    retryable = {code for code, error in BY_CODE.items() if error.retryable}
    assert retryable == {
        "rejected",
        "queue_full",
        "unavailable",
        "shutting_down",
        "worker_died",
        "broker_lost",
        "shm_short",
    }


def test_the_text_is_made_of_the_fields_unless_it_is_given() -> None:
    made = QueueFull(model="m", depth=256, limit=256, unit="requests", retry_after_ms=4)
    assert str(made) == made.message == "queue of 'm' is full: 256 of 256 requests; retry after 4 ms"
    assert str(QueueFull("given", depth=1)) == "given"
