"""What ``kes verify`` compares."""

from __future__ import annotations

from streams.testing.trial import Left, differences

OUT = ("balances", b"k")


def left(*values: bytes, letters: int = 0, state: dict[tuple[int, bytes], bytes] | None = None) -> Left:
    found = Left({}, {}, state or {})
    if values:
        found.outputs[OUT] = [(value, ()) for value in values]
    if letters:
        found.letters[b"k", b"v"] = letters
    return found


def test_the_same_is_the_same() -> None:
    state = {(0, b"k"): b"2"}
    assert differences(left(b"1", b"2", letters=1, state=state), left(b"1", b"2", letters=1, state=state)) == []


def test_an_output_twice_is_found() -> None:
    (text,) = differences(left(b"1", b"2"), left(b"1", b"1", b"2"))
    assert text.startswith("balances, key b'k': 3 outputs, 2 undisturbed; number 1 is")


def test_a_missing_output_is_found() -> None:
    assert differences(left(b"1", b"2"), left(b"1")) == ["balances, key b'k': 1 outputs, 2 undisturbed"]
    assert differences(left(b"1"), left()) == ["balances, key b'k': 0 outputs, 1 undisturbed"]


def test_another_order_is_found_unless_it_does_not_matter() -> None:
    assert differences(left(b"1", b"2"), left(b"2", b"1"))
    assert not differences(left(b"1", b"2"), left(b"2", b"1"), any_order=True)
    assert differences(left(b"1", b"2"), left(b"2", b"2"), any_order=True)


def test_state_and_dead_letters_are_compared() -> None:
    assert differences(left(letters=1), left(letters=2)) == ["dead letter with key b'k': 2 times, 1 undisturbed"]
    (text,) = differences(left(state={(3, b"k"): b"1"}), left(state={(3, b"k"): b"2"}))
    assert text == "state of partition 3, key b'k': b'2', undisturbed b'1'"
    assert differences(left(state={(3, b"k"): b"1"}), left()) == [
        "state of partition 3, key b'k': nothing, undisturbed b'1'"
    ]
