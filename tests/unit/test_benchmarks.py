"""The harness of the benchmarks: that it counts and judges rightly. Nothing here asserts a speed."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from benchmarks import bench
from benchmarks.account.report import held, reference_of
from benchmarks.drain import DrainResult, middle_rate, stretch
from benchmarks.engine import MADE, wait
from benchmarks.reader import Gap, percentiles
from benchmarks.stalls.group import Silence, Stall, Window, silences
from benchmarks.stalls.measure import Stalls
from benchmarks.stalls.member import Status, fresh, is_settled, statuses
from benchmarks.steady import SteadyResult, behind_of
from benchmarks.systems import REFERENCE, Failed, System, running
from benchmarks.tables import ratios
from benchmarks.workload import (
    KEYS,
    ONE_EACH,
    PARTITIONS,
    VALUE_BYTES,
    Balance,
    Deposited,
    Job,
    Judge,
    deposits,
    encoded,
    wait_seconds,
)
from streams.sak.murmur2 import partition_of
from tests.unit.benchmarks_kit import rows_of, run_of, shown

JOB = Job(bootstrap_servers="127.0.0.1:1", group="g", source="in", output="out", changelog="log")
EVENTS = 30_000


def outputs(seed: int, events: int = EVENTS) -> list[tuple[str, Balance]]:
    """The outputs of a right system."""
    counts: dict[str, int] = {}
    sums: dict[str, int] = {}
    found = []
    for account, cents in islice(deposits(seed), events):
        counts[account] = counts.get(account, 0) + 1
        sums[account] = sums.get(account, 0) + cents
        found.append((account, Balance(account, counts[account], sums[account], 0.0)))
    return found


def verdict(found: list[tuple[str, Balance]], seed: int, handled: int, written: int = 0) -> str:
    judge = Judge()
    for key, balance in found:
        judge.add(key, balance)
    return judge.verdict(seed, handled, written)


def test_events_are_the_same_for_a_seed_and_of_the_stated_size() -> None:
    first, again, other = (list(islice(deposits(seed), 500)) for seed in (1, 1, 2))
    assert first == again != other
    sizes = [len(encoded(account, cents, time.time())) for account, cents in first]
    assert {size in range(VALUE_BYTES - 5, VALUE_BYTES + 4) for size in sizes} == {True}
    assert {int(account[-5:]) < KEYS for account, _ in first} == {True}
    assert msgspec.json.decode(encoded("a", 7, 1.5), type=Deposited).cents == 7
    assert 100 < sum(wait_seconds(cents) == 0.5 for _, cents in islice(deposits(1), 20_000)) < 300
    in_turn = [account for account, _ in islice(deposits(1, in_turn=True), 2 * PARTITIONS)]
    assert in_turn == ONE_EACH * 2
    assert [partition_of(account.encode(), PARTITIONS) for account in ONE_EACH] == list(range(PARTITIONS))


def test_the_judge_takes_a_right_system_also_when_it_was_stopped() -> None:
    found = outputs(3)
    assert verdict(found, 3, EVENTS) == ""
    behind = {ONE_EACH[0], ONE_EACH[1]}
    some = [(key, balance) for key, balance in found if key not in behind or balance.count == 1]
    assert verdict(some, 3, len(some), EVENTS) == "", "the first ones of each account"
    assert verdict(some, 3, len(some)) != ""


@pytest.mark.parametrize("fault", ["lost", "last lost", "twice", "swapped", "wrong sum", "wrong key", "other seed"])
@pytest.mark.parametrize("written", [0, EVENTS + 1_000], ids=["complete", "stopped"])
def test_the_judge_sees_every_fault(fault: str, written: int) -> None:
    found = outputs(3)
    account = found[random.Random(3).randrange(10_000)][0]
    mine = [number for number, (key, _) in enumerate(found) if key == account]
    assert len(mine) > 1
    if fault == "lost":
        del found[mine[0]]
    elif fault == "last lost":
        del found[-1]
    elif fault == "twice":
        found.insert(mine[-1] + 1, found[mine[-1]])
    elif fault == "swapped":
        found[mine[0]], found[mine[1]] = found[mine[1]], found[mine[0]]
    elif fault == "wrong sum":
        last = found[mine[-1]][1]
        found[mine[-1]] = account, msgspec.structs.replace(last, cents=last.cents + 1)
    elif fault == "wrong key":
        found[mine[0]] = "another", found[mine[0]][1]
    assert verdict(found, 4 if fault == "other seed" else 3, EVENTS, written) != ""


def test_every_way_to_handle_the_workload_can_be_built_and_waits() -> None:
    for made in MADE.values():
        assert made(JOB).program()
    began = time.monotonic()
    asyncio.run(wait(Deposited("a", 7, 0.0, "")))
    assert time.monotonic() - began >= 0.005


def test_the_rate_is_that_of_the_middle() -> None:
    steady = [number * 10 for number in range(1_000)]
    assert middle_rate(steady) == pytest.approx(100)
    slow_ends = [-60_000, *steady, 90_000]
    random.Random(1).shuffle(slow_ends)
    assert middle_rate(slow_ends) == pytest.approx(100, rel=0.01)
    assert middle_rate([1, 2]) == 0.0
    assert stretch([0, 5, 10, 40, 80, 90, 100], 100) == (2, 5)
    assert stretch([0, 100], 100) == (0, 1)
    assert stretch([0, 0, 0, 100], 100) == (2, 3)
    assert percentiles([float(n) for n in reversed(range(100))]) == (50, 99, 99)
    assert percentiles([]) == (0, 0, 0)


def drained(system: str, turn: int, rate: float, fault: str = "") -> DrainResult:
    return DrainResult(system, turn, fault, 100, rate, 1e6 / rate, 2.0, 3, 0.5)


def test_ratios_are_taken_within_a_round_and_to_the_loop_of_the_same_kind() -> None:
    pairs = [(100, 200), (1, 2), (50, 25)]
    found = [
        drained(name, turn, rate) for turn, pair in enumerate(pairs, 1) for name, rate in zip("ab", pair, strict=True)
    ]
    found.append(drained("b", 4, 1_000))
    assert ratios(found, "b", "a", lambda one: one.per_second) == [2.0, 2.0, 0.5]
    systems = ["scheduler:slots=16", "loop:slots=64", "loop:slots=16", "quixstreams:waits=1"]
    assert reference_of("scheduler:slots=16", systems) == "loop:slots=16"
    assert reference_of("quixstreams:waits=1", systems) == "loop:slots=64"
    assert reference_of("engine", ["engine", REFERENCE]) == REFERENCE


def test_a_run_with_a_fault_has_no_rate() -> None:
    run = run_of(drain=[drained("a", 1, 10), drained("b", 1, 20, "2 outputs out of turn"), drained("c", 1, 5)])
    assert run.faults(of_peers=False) == ["b: 2 outputs out of turn"]
    text = shown(run)
    assert "not right: b: 2 outputs out of turn" in text
    rows = {row[0]: row[1:] for row in rows_of(text)}
    assert rows["c"][:2] == ["5", "0.50"]
    assert (rows["b"][0], rows["b"][-1]) == ("-", "no: 1 of 1 runs")


def test_systems_are_named_on_the_command_line() -> None:
    system = System.parse("engine@../other:pool.batch_delay_seconds=0.005,switch=0.001")
    launch = system.launch()
    assert (launch.command[1:], launch.folder) == (("-m", "benchmarks.engine"), Path("../other"))
    assert system.options == {"pool.batch_delay_seconds": "0.005", "switch": "0.001"}
    assert System.parse("engine_batch").launch().command[1:] == ("-m", "benchmarks.engine", "batch")
    with pytest.raises(ValueError, match="unknown system"):
        System.parse("nonsense")


def test_a_child_that_fails_is_shown_with_its_output(tmp_path: Path) -> None:
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


# ---------------------------------------------------------------------------------------------------- silences


def test_a_silence_counts_as_far_as_it_was_watched_and_moves_are_changes_of_the_writer() -> None:
    gaps = [Gap(0, 0.0, 0.9), Gap(0, 1.1, 1.5, True), Gap(0, 1.5, 1.7, True), Gap(0, 1.7, 3.0), Gap(3, 1.0, 1.2)]

    def found(since: float, until: float) -> dict[int, tuple[float, int, float]]:
        every = silences(gaps, Window(since, until))
        return {one.partition: (one.milliseconds, one.moves, one.at_move) for one in every if one.milliseconds}

    assert found(1.0, 1.6) == {0: (400.0, 1, 400.0), 3: (200.0, 0, 0.0)}
    assert found(1.0, 2.5) == {0: (800.0, 2, 400.0), 3: (200.0, 0, 0.0)}, "as far as it was watched"
    assert found(2.5, 3.5) == {0: (1300.0, 0, 0.0)}, "from before the window"
    assert found(5.0, 6.0) == {}


def status(
    active: range = range(0), ready: range = range(0), moving: int = 0, state: str = "running", at: float = 0.0
) -> Status:
    return Status(at, 7, list(active), list(ready), moving, state)


def test_a_group_has_settled_when_all_is_shared_and_warm() -> None:
    low, high = range(5), range(5, 10)
    assert is_settled([status(low), status(high)], 2, 0)
    assert is_settled([status(low, high), status(high, low)], 2, 1)
    assert is_settled([status(low, range(4, 10)), status(high, low)], 2, 1), "one replica too many"
    assert is_settled([status(range(10))], 1, 1), "there is no member for replicas"
    assert not is_settled([status(low), status(high)], 2, 1), "no replicas"
    assert not is_settled([status(low), status(high)], 3, 0), "one is missing"
    assert not is_settled([status(range(3)), status(range(3, 10))], 2, 0), "uneven"
    assert not is_settled([status(low), status(low)], 2, 0), "the same ones twice"
    assert not is_settled([status(low), status(high, moving=1)], 2, 0)
    assert not is_settled([status(low), status(high, state="stopping")], 2, 0)


def test_old_statuses_and_those_of_the_dead_do_not_count(tmp_path: Path) -> None:
    for name, at in (("a.1", time.time()), ("b.2", time.time()), ("c.3", 1.0)):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(status(at=at)))
    assert set(statuses(tmp_path)) == {"a.1", "b.2", "c.3"}
    assert set(fresh(statuses(tmp_path), {"b.2"})) == {"a.1"}


def test_stalls_are_summed_up_over_rounds() -> None:
    def stall(round_: int, *times: tuple[float, int], fault: str = "") -> Stall:
        found = [Silence(n, ms, moves, ms - 1 if moves else 0) for n, (ms, moves) in enumerate(times)]
        return Stall("join, 1 to 2", round_, 2 + round_, found, 3.0, fault)

    stalls = [stall(1, (100, 1), (7, 0)), stall(2, (300, 1), (9, 0)), stall(3, (200, 2), (8, 0), fault="lost one")]
    run = run_of(stalls=stalls)
    assert run.faults(of_peers=False) == ["join, 1 to 2, round 3: lost one"]
    row = next(row for row in rows_of(shown(run)) if row[0] == "join, 1 to 2")
    assert row == ["join, 1 to 2", "1", "199", "299", "200", "300", "8", "9", "3-4", "3", "2"]
    assert "1 moved up to 99 ms" in Stalls().in_short(stalls[0])
    assert [(aim.found, aim.is_met) for aim in Stalls().aims(stalls)] == [("199 ms, worst 299 ms", False)]


# ------------------------------------------------------------------------------------------------- fixed rates


def test_whether_a_rate_was_held() -> None:
    assert behind_of(900, 50) == ""
    assert "could not keep up" in behind_of(1_500, 50)
    assert "the generator" in behind_of(5_000, 3_000), "nothing is known about the system"
    fast, slow = (SteadyResult("a", turn, rate=500, behind=text) for turn, text in ((1, ""), (2, "late")))
    assert held([fast, slow]) == [fast]


def test_costs_are_shown_of_rates_that_were_held() -> None:
    def live(system: str, partitions: int, us: float, behind: str = "") -> SteadyResult:
        return SteadyResult(system, 1, "", 500, partitions, cpu_share=us * 500 / 1e6, behind=behind)

    found = [live("a", 10, 8), live("b", 10, 12), live("a", 400, 9), live("b", 400, 30, "it was late")]
    rows = [row for row in rows_of(shown(run_of(live=found))) if row[0] in ("a", "b")]
    assert [[row[0], *row[7:10]] for row in rows] == [
        ["a", "8", "1.00", "yes"],
        ["b", "12", "1.50", "yes"],
        ["a", "9", "1.00", "yes"],
        ["b", "-", "-", "no: 1 of 1 runs"],
    ]


# ----------------------------------------------------------------------------------------------- a warm broker


def test_only_compilers_count_for_the_warmth_of_a_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.compiler_seconds(os.getpid()) == 0.0, "no Java, no compilers"
    ticks = os.sysconf("SC_CLK_TCK")
    for tid, name in enumerate(("C2 CompilerThre", "C1 CompilerThre", "data-plane (x) y", "GC Thread#0")):
        task = tmp_path / "task" / str(tid)
        task.mkdir(parents=True)
        fields = ["0"] * 50
        fields[11], fields[12] = str(2 * ticks), str(ticks)
        (task / "stat").write_text(f"{tid} ({name}) S {' '.join(fields[1:])}")
    (tmp_path / "task" / "ended").mkdir()
    monkeypatch.setattr(bench, "Path", lambda _: tmp_path / "task")
    assert bench.compiler_seconds(1) == 6.0
