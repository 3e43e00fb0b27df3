"""``benchmarks.warm``: how long a broker is warmed up."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks import warm


class Broker:
    """Its compilers work for so many seconds per run, each of a second; then no more."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.now, self.compiled = seconds, 0.0, 0.0

    def run(self, number: int) -> None:
        self.now += 1.0
        self.compiled += self.seconds[number] if number < len(self.seconds) else 0.0

    def warmed(self, monkeypatch: pytest.MonkeyPatch) -> warm.Warmth:
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(warm, "compiler_seconds", lambda _pid: self.compiled)
        return warm.until_warm(1, self.run)


def test_runs_go_on_until_the_compilers_are_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Broker(1.5, 0.9, 0.4, 0.11, 0.09, 0.5).warmed(monkeypatch) == warm.Warmth(5, pytest.approx(0.09))


def test_one_run_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Broker().warmed(monkeypatch) == warm.Warmth(1, 0.0)


def test_a_machine_that_never_gets_calm_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Broker(*[0.5] * 100).warmed(monkeypatch) == warm.Warmth(warm.MOST_RUNS, 0.5)


def test_only_compilers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    for tid, name in enumerate(("C2 CompilerThre", "C1 CompilerThre", "data-plane (x) y", "GC Thread#0")):
        task = tmp_path / "task" / str(tid)
        task.mkdir(parents=True)
        fields = ["0"] * 50
        fields[11], fields[12] = str(2 * ticks), str(ticks)
        (task / "stat").write_text(f"{tid} ({name}) S {' '.join(fields[1:])}")
    (tmp_path / "task" / "ended").mkdir()
    monkeypatch.setattr(warm, "Path", lambda _: tmp_path / "task")
    assert warm.compiler_seconds(1) == 6.0


def test_no_java_no_compilers() -> None:
    assert warm.compiler_seconds(os.getpid()) == 0.0
