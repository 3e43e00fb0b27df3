"""What ``kes verify`` compares."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from streams.cli.verify import _text
from streams.config import EventSourceConfig
from streams.testing.verification import Attack, Left, Trial, TrialFailed, differences

OUT = ("balances", b"k")


def left(*values: bytes, letters: int = 0, state: dict[tuple[int, bytes], bytes] | None = None) -> Left:
    found = Left({}, {}, state or {})
    if values:
        found.outputs[OUT] = [(value, ()) for value in values]
    if letters:
        found.letters[b"k", b"v"] = letters
    return found


ONE, TWO = {(3, b"k"): b"1"}, {(3, b"k"): b"2"}
DIFFERENCES: list[tuple[Left, Left, list[str]]] = [
    (left(b"1", b"2", letters=1, state=ONE), left(b"1", b"2", letters=1, state=ONE), []),
    (left(b"1", b"2"), left(b"1"), ["balances, key b'k': 1 outputs, 2 undisturbed"]),
    (left(b"1"), left(), ["balances, key b'k': 0 outputs, 1 undisturbed"]),
    (left(letters=1), left(letters=2), ["dead letter with key b'k': 2 times, 1 undisturbed"]),
    (left(state=ONE), left(state=TWO), ["state of partition 3, key b'k': b'2', undisturbed b'1'"]),
    (left(state=ONE), left(), ["state of partition 3, key b'k': nothing, undisturbed b'1'"]),
]


@pytest.mark.parametrize(("undisturbed", "attacked", "said"), DIFFERENCES)
def test_what_differs_is_told(undisturbed: Left, attacked: Left, said: list[str]) -> None:
    assert differences(undisturbed, attacked) == said


def test_another_order_differs_unless_it_does_not_matter() -> None:
    (text,) = differences(left(b"1", b"2"), left(b"1", b"1", b"2"))
    assert text.startswith("balances, key b'k': 3 outputs, 2 undisturbed; number 1 is")
    assert differences(left(b"1", b"2"), left(b"2", b"1"))
    assert not differences(left(b"1", b"2"), left(b"2", b"1"), any_order=True)
    assert differences(left(b"1", b"2"), left(b"2", b"2"), any_order=True)


@pytest.mark.parametrize(
    ("end", "kept"),
    [(b"a", False), (b"b", True), (KeyboardInterrupt(), False), (SystemExit(143), False), (TrialFailed("x"), True)],
    ids=["the same", "differs", "SIGINT", "SIGTERM", "failed"],
)
def test_logs_stay_when_somebody_has_to_read_them(
    end: bytes | BaseException, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    class Scripted(Trial):
        def _undisturbed(self, attack: Attack) -> Left:
            (self._folder / "undisturbed.log").write_text("what happened")
            return left(b"a")

        def _attacked(self, attack: Attack) -> tuple[Left, int, int]:
            if isinstance(end, BaseException):
                raise end
            return Left({OUT: [(end, ())]}, {}, {}, timers=3), 1, 0

    trial = Scripted("shop:source", EventSourceConfig(group_id="g", topic="t", num_partitions=1), [])
    if isinstance(end, BaseException):
        with pytest.raises(type(end)):
            trial.run(Attack())
    else:
        verdict = trial.run(Attack())
        text = _text(verdict).plain
        assert "3 timers were not due: they did not fire" in text
        assert (f"logs of the workers: {verdict.logs}" in text) == kept == bool(verdict.logs)
        assert not kept or (Path(verdict.logs) / "undisturbed.log").read_text() == "what happened"
    assert bool(os.listdir(tmp_path)) == kept
