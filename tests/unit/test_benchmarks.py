"""The harness of the benchmarks: that it counts and judges rightly. Nothing here asserts a speed."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from benchmarks.__main__ import parse
from benchmarks.drain import DrainResult, middle_rate, stretch
from benchmarks.report import Run, machine_facts, paired_ratio, show
from benchmarks.steady import memory_of
from benchmarks.systems import Failed, System, running
from benchmarks.workload import KEYS, VALUE_BYTES, Balance, Deposited, Job, Judge, deposits, encoded

JOB = Job(bootstrap_servers="127.0.0.1:1", group="g", source="in", output="out", changelog="log")


def outputs(seed: int, events: int) -> list[tuple[str, Balance]]:
    """What a right system sends."""
    counts: dict[str, int] = {}
    sums: dict[str, int] = {}
    found = []
    for _, (account, cents) in zip(range(events), deposits(seed), strict=False):
        counts[account] = counts.get(account, 0) + 1
        sums[account] = sums.get(account, 0) + cents
        found.append((account, Balance(account, counts[account], sums[account], 0.0)))
    return found


def verdict(heard: list[tuple[str, Balance]], seed: int, events: int) -> str:
    judge = Judge()
    for key, balance in heard:
        judge.hear(key, balance)
    return judge.verdict(seed, events)


def test_events_are_the_same_for_a_seed_and_of_the_stated_size() -> None:
    first, again, other = ([pair for _, pair in zip(range(500), deposits(seed), strict=False)] for seed in (1, 1, 2))
    assert first == again != other
    assert all(
        len(encoded(account, cents, time.time())) in range(VALUE_BYTES - 5, VALUE_BYTES + 4) for account, cents in first
    )
    assert {int(account[-5:]) < KEYS for account, _ in first} == {True}
    assert msgspec.json.decode(encoded("a", 7, 1.5), type=Deposited).cents == 7


def test_the_judge_takes_what_is_right() -> None:
    assert verdict(outputs(3, 2_000), 3, 2_000) == ""


@pytest.mark.parametrize("fault", ["lost", "last lost", "twice", "swapped", "wrong sum", "wrong key", "other seed"])
def test_the_judge_sees_every_fault(fault: str) -> None:
    heard = outputs(3, 30_000)
    place = random.Random(3).randrange(10_000)
    account = heard[place][0]
    mine = [number for number, (key, _) in enumerate(heard) if key == account]
    if fault == "lost":
        del heard[mine[0]]
    elif fault == "last lost":
        del heard[-1]
    elif fault == "twice":
        heard.insert(mine[-1] + 1, heard[mine[-1]])
    elif fault == "swapped":
        assert len(mine) > 1
        heard[mine[0]], heard[mine[1]] = heard[mine[1]], heard[mine[0]]
    elif fault == "wrong sum":
        last = heard[mine[-1]][1]
        heard[mine[-1]] = account, msgspec.structs.replace(last, cents=last.cents + 1)
    elif fault == "wrong key":
        heard[mine[0]] = "somebody", heard[mine[0]][1]
    assert verdict(heard, 4 if fault == "other seed" else 3, 30_000) != ""


def test_the_rate_is_that_of_the_middle() -> None:
    steady = [number * 10 for number in range(1_000)]
    assert middle_rate(steady) == pytest.approx(100)
    slow_ends = [-60_000, *steady, 90_000]
    random.Random(1).shuffle(slow_ends)
    assert middle_rate(slow_ends) == pytest.approx(100, rel=0.01)
    assert middle_rate([1, 2]) == 0.0


def test_the_stretch_lies_around_the_middle_and_is_never_empty() -> None:
    assert stretch([0, 5, 10, 40, 80, 90, 100], 100) == (2, 5)
    assert stretch([0, 100], 100) == (0, 1)
    assert stretch([0, 0, 0, 100], 100) == (2, 3)


def test_memory_is_summed_up_by_quarters() -> None:
    memory = memory_of([5, 5, 7, 7, 9, 9, 30, 10])
    assert (memory.second_quarter, memory.last_quarter, memory.highest) == (7, 20, 30)
    assert memory_of([3]).last_quarter == 3


def drained(system: str, rate: float, fault: str = "") -> DrainResult:
    return DrainResult(system, 100, 1, rate, 1e6 / rate, 2.0, 1.0, 1, 2, 3, 0.5, fault)


def test_ratios_are_taken_within_a_round() -> None:
    found = [drained("a", 100), drained("b", 200), drained("a", 1), drained("b", 2), drained("a", 50), drained("b", 25)]
    assert paired_ratio(found, "b", "a", lambda one: one.per_second) == pytest.approx(2.0)


def test_a_run_with_a_fault_says_so_and_can_be_written() -> None:
    run = Run(machine_facts(1, ["--quick"]), drains=[drained("a", 10), drained("b", 20, "2 outputs out of turn")])
    assert run.faults == ["b: 2 outputs out of turn"]
    console = Console(width=130, record=True, file=io.StringIO())
    show(console, run)
    text = console.export_text()
    assert "not exactly once" in text
    assert "2.00" in text
    assert msgspec.json.decode(msgspec.json.encode(run))["facts"]["seed"] == 1


def test_systems_are_named_on_the_command_line() -> None:
    system = System.parse("engine@../other:pool.batch_delay_seconds=0.005,switch=0.001")
    assert (system.module, system.folder) == ("benchmarks.engine", Path("../other"))
    assert system.options == {"pool.batch_delay_seconds": "0.005", "switch": "0.001"}
    with pytest.raises(ValueError, match="unknown system"):
        System.parse("nonsense")
    assert parse(["drain", "--quick"]).repeats == 1
    with pytest.raises(SystemExit):
        parse(["speed"])


def test_a_child_that_fails_is_told_with_what_it_said(tmp_path: Path) -> None:
    package = tmp_path / "broken.py"
    package.write_text("import sys\nprint('the reason', file=sys.stderr)\nsys.exit(4)\n")
    with running("broken", JOB, tmp_path) as child, pytest.raises(Failed, match=r"(?s)code 4.*the reason"):
        child.result(30)


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    imports = "import threading\nfrom benchmarks.child import job_of\nfrom benchmarks.workload import Job\n"
    (tmp_path / "sleeper.py").write_text(imports + "job_of(Job)\nthreading.Event().wait(60)\n")
    root = str(Path(__file__).parents[2])
    sleeper = subprocess.Popen(
        [sys.executable, "-m", "sleeper", msgspec.json.encode(JOB).decode()],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        env={"PYTHONPATH": root},
    )
    assert sleeper.stdin is not None
    sleeper.stdin.close()
    assert sleeper.wait(30) == 3
