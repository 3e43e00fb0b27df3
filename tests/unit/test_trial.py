"""What ``kes verify`` compares."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streams import EventSource, Table
from streams.cli.verify import _text
from streams.settings.config import EventSourceConfig, StateConfig
from streams.testing.verification import Attack, Left, Trial, TrialFailed, differences
from streams.testing.verification_worker import moved

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


def test_a_worker_keeps_its_state_in_the_trials_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KES_INSTANCE_ID", "worker-0")
    state = StateConfig(folder="state", snapshots="s3://bucket/kes", checkpoint_seconds=1.0)
    source: Any = EventSource(
        EventSourceConfig(group_id="g", topic="t", num_partitions=1, state=state), Table.factory(key=str, value=int)
    )
    kept = moved(source, "127.0.0.1:1", "/tmp/trial").config.state
    assert kept == StateConfig(folder="/tmp/trial/state", snapshots="/tmp/trial/snapshots", checkpoint_seconds=1.0)
    source.config = EventSourceConfig(group_id="g", topic="t", num_partitions=1)
    assert moved(source, "127.0.0.1:1", "/tmp/trial").config.state == StateConfig()


def test_a_topic_that_nobody_makes_ends_the_trial(tmp_path: Path) -> None:
    """One that is there by now does not."""
    failed = "WARNING transaction 1 (attempt 1) failed"
    log = f"{failed}: produce: UNKNOWN_TOPIC_OR_PARTITION (a-b.c: Broker: ...); resend\nmore\n"
    worker: Any = SimpleNamespace(runs=True, tail=log, log=tmp_path / "undisturbed.log")
    lacking: Any = SimpleNamespace(lacks=lambda topic: topic == "a-b.c")
    there: Any = SimpleNamespace(lacks=lambda topic: False)
    trial = Trial("shop:source", EventSourceConfig(group_id="g", topic="t", num_partitions=1), [])
    with pytest.raises(TrialFailed, match=r"source\.output\('a-b\.c'\), or name it with --output a-b\.c:PARTITIONS"):
        trial._check(lacking, [worker], time.monotonic() + 60, "")
    trial._check(there, [worker], time.monotonic() + 60, "")
