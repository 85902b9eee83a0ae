from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxpool.broker.outbox import Message, Outbox

MESSAGES = st.tuples(st.binary(max_size=6), st.one_of(st.none(), st.binary(max_size=9)))


@given(
    messages_max=st.integers(0, 5),
    bytes_max=st.integers(0, 30),
    moves=st.lists(st.one_of(st.just("pop"), MESSAGES), max_size=60),
)
def test_outbox_is_a_plain_list_with_two_limits(messages_max: int, bytes_max: int, moves: list[str | Message]) -> None:
    outbox = Outbox(messages_max, bytes_max)
    plain: list[Message] = []
    for move in moves:
        if isinstance(move, tuple):
            held = sum(len(header) + len(body or b"") for header, body in [*plain, move])
            fits = len(plain) < messages_max and held <= bytes_max
            assert outbox.push(*move) is fits
            if fits:
                plain.append(move)
        elif plain:
            assert outbox.peek() == plain[0]
            outbox.pop()
            plain.pop(0)
        assert len(outbox) == len(plain)
        assert bool(outbox) is bool(plain)
    for message in plain:
        assert outbox.peek() == message
        outbox.pop()
    with pytest.raises(IndexError):
        outbox.peek()
