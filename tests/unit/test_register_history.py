"""The checker of histories itself: it must fail on a stale read, else it proves nothing."""

from __future__ import annotations

from tests.broker.register_history import Operation, is_linearizable


def write(value: int, called: float, answered: float | None) -> Operation:
    return Operation("write", value, called, answered)


def read(value: int, called: float, answered: float) -> Operation:
    return Operation("read", value, called, answered)


def test_histories_that_have_an_order_are_taken() -> None:
    assert is_linearizable([])
    assert is_linearizable([write(1, 0, 1), read(1, 2, 3), write(2, 4, 5), read(2, 6, 7)])
    assert is_linearizable([write(1, 0, 10), read(0, 1, 2), read(1, 3, 4)]), "it may happen in between"
    assert is_linearizable([write(1, 0, None), read(0, 1, 2), read(1, 3, 4)]), "without an answer: later"
    assert is_linearizable([write(1, 0, None), read(0, 5, 6)]), "or never"
    assert is_linearizable([write(1, 0, 9), write(2, 0, 9), read(2, 1, 2), read(1, 3, 4)])


def test_a_stale_read_is_found() -> None:
    assert not is_linearizable([write(1, 0, 1), read(0, 2, 3)])
    assert not is_linearizable([write(1, 0, 1), write(2, 2, 3), read(1, 4, 5)])
    assert not is_linearizable([write(1, 0, 10), read(1, 1, 2), read(0, 3, 4)]), "and back again"
    assert not is_linearizable([write(1, 0, None), read(1, 1, 2), read(0, 3, 4)])
    assert not is_linearizable([read(7, 0, 1)]), "nobody wrote it"
    long = [
        operation
        for turn in range(60)
        for operation in (write(turn, turn, turn + 0.4), read(turn, turn + 0.5, turn + 1))
    ]
    assert is_linearizable(long)
    assert not is_linearizable([*long, read(3, 100, 101)])
