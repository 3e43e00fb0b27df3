"""The harness of the benchmarks: that it counts and judges rightly. Nothing here asserts a speed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.drain import DrainResult, middle_rate, stretch
from benchmarks.restore.run import Restore, fault_of
from benchmarks.restore.workload import Restored, changes, digest, partition_of
from benchmarks.stalls.group import Stall
from benchmarks.stalls.member import Measured, Note, Status
from benchmarks.stalls.report import chain_medians, in_short
from benchmarks.stalls.silences import Silence, Window, longest, silences
from benchmarks.stalls.traces import Traces, is_settled
from benchmarks.stalls.workload import Ledger, Seen, Stepped
from benchmarks.stalls.workload import account as account_of
from benchmarks.stalls.workload import cents as cents_of
from benchmarks.steady import memory_of
from benchmarks.systems import Failed, System, running
from benchmarks.tables import ratios
from benchmarks.workload import KEYS, PARTITIONS, VALUE_BYTES, Balance, Deposited, Job, Judge, deposits, encoded
from tests.unit.benchmarks_kit import rows_of, run_of, shown

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


def drained(system: str, turn: int, rate: float, fault: str = "") -> DrainResult:
    return DrainResult(system, turn, 100, 1, fault, rate, 1e6 / rate, 2.0, 1.0, 1, 2, 3, 0.5)


def test_ratios_are_taken_within_a_round() -> None:
    pairs = [(100, 200), (1, 2), (50, 25)]
    found = [
        drained(name, turn, rate) for turn, pair in enumerate(pairs, 1) for name, rate in zip("ab", pair, strict=True)
    ]
    found.append(drained("b", 4, 1_000))
    assert ratios(found, "b", "a", lambda one: one.per_second) == [2.0, 2.0, 0.5]


def test_a_run_with_a_fault_says_so_and_has_no_rate() -> None:
    found = [drained("a", 1, 10), drained("b", 1, 20, "2 outputs out of turn"), drained("c", 1, 5)]
    run = run_of(drain=found)
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
    with pytest.raises(ValueError, match="unknown system"):
        System.parse("nonsense")


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


def seen(times: list[tuple[float, str]], partition: int = 0) -> list[Seen]:
    return [Seen(at, partition, n + 1, at, at, by) for n, (at, by) in enumerate(times)]


def test_a_silence_counts_as_far_as_it_was_watched_and_moves_are_changes_of_the_writer(tmp_path: Path) -> None:
    heard = seen([(0.0, "a.1"), (0.9, "a.1"), (1.1, "a.1"), (1.5, "b.2"), (1.7, "a.1"), (3.0, "a.1")])
    heard += seen([(1.0, "a.1"), (1.2, "a.1"), (1.3, "a.1")], partition=3)
    found = silences(heard, Window(1.0, 2.0), Traces(tmp_path))
    assert [(one.partition, one.milliseconds, one.moves) for one in found] == [(0, 400.0, 2), (3, 200.0, 0)]
    assert longest(heard[:6], Window(5.0, 6.0)) is None
    assert silences(heard, Window(2.5, 3.5), Traces(tmp_path))[0].milliseconds == 1300.0
    assert silences(heard, Window(1.0, 2.5), Traces(tmp_path))[0].milliseconds == 800.0, "as far as it was watched"


def write(folder: Path, name: str, *lines: Status | Measured | Note) -> None:
    (folder / f"{name}.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def test_the_chain_of_a_move_adds_up_to_its_silence(tmp_path: Path) -> None:
    out = {"partition": 0, "direction": "out", "peer": "m", "seconds": 0.05}
    write(
        tmp_path, "a.1", Measured(10.1, "PartitionMoved", out), Measured(10.2, "PartitionMoved", out | {"partition": 1})
    )
    write(tmp_path, "b.2", Note(10.12, "activated", 0), Note(10.11, "activated", 1), Note(10.13, "first event", 0))
    traces = Traces(tmp_path)
    traces.refresh()
    (move,) = silences(seen([(10.02, "a.1"), (10.2, "b.2")]), Window(9.0, 11.0), traces)
    assert move.at_move == 180.0
    assert move.chain == {"marker committed": 50.0, "started": 20.0, "first event": 10.0, "seen by the reader": 70.0}
    assert sum(move.chain.values()) == pytest.approx(150)  # from the end of the intake, at 10.05


def test_the_chain_of_a_take_over_begins_with_the_action(tmp_path: Path) -> None:
    taken = {"partition": 0, "fence_seconds": 0.1, "barrier_seconds": 0.2, "restore_seconds": 0.3}
    write(tmp_path, "b.2", Measured(17.0, "TakeOverDone", taken), Note(17.0, "activated", 0))
    traces = Traces(tmp_path)
    traces.refresh()
    (move,) = silences(seen([(9.9, "a.1"), (17.5, "b.2")]), Window(10.0, 18.0), traces)
    due = {"plan heard": 6400.0, "fenced": 100.0, "offsets known": 200.0, "started": 300.0, "seen by the reader": 500.0}
    assert move.chain == due


def test_traces_are_read_while_they_are_written(tmp_path: Path) -> None:
    traces = Traces(tmp_path)
    refused = Measured(5.0, "TransactionSettled", {"committed": True, "attempts": 2})
    whole = b"".join(msgspec.json.encode(one) + b"\n" for one in (status(at=4.0), refused))
    path = tmp_path / "a.1.jsonl"
    path.write_bytes(whole[:-5])
    traces.refresh()
    assert (len(traces.lines["a.1"]), traces.generation(), traces.fresh()) == (1, 7, {})
    path.write_bytes(whole)
    assert (traces.refused(0, 4.9), traces.refused(0, 5)) == (0, 0)
    traces.refresh()
    assert (traces.refused(0, 4.9), traces.refused(0, 5)) == (0, 1)
    path.write_bytes(whole + msgspec.json.encode(status(at=time.time())) + b"\n")
    assert list(traces.fresh()) == ["a.1"]


def status(
    active: range = range(0), ready: range = range(0), moving: int = 0, state: str = "running", at: float = 0.0
) -> Status:
    return Status(at, 7, "m", list(active), list(ready), moving, state)


def test_a_group_has_settled_when_all_is_shared_and_warm() -> None:
    low, high = range(5), range(5, 10)
    assert is_settled([status(low), status(high)], 2, 0)
    assert is_settled([status(low, high), status(high, low)], 2, 1)
    assert is_settled([status(low, range(4, 10)), status(high, low)], 2, 1), "one copy too many"
    assert is_settled([status(range(10))], 1, 1), "nobody is there to keep copies"
    assert not is_settled([status(low), status(high)], 2, 1), "no copies"
    assert not is_settled([status(low), status(high)], 3, 0), "one is missing"
    assert not is_settled([status(range(3)), status(range(3, 10))], 2, 0), "uneven"
    assert not is_settled([status(low), status(low)], 2, 0), "the same ones twice"
    assert not is_settled([status(low), status(high, moving=1)], 2, 0)
    assert not is_settled([status(low), status(high, state="stopping")], 2, 0)


@pytest.mark.parametrize("fault", ["", "lost", "last lost", "twice", "swapped", "wrong sum", "wrong key"])
def test_the_ledger_sees_every_fault(fault: str) -> None:
    rounds, ledger = 20, Ledger()
    heard = []
    for partition in range(PARTITIONS):
        sums = [sum(map(cents_of, range(1, count + 1))) for count in range(1, rounds + 1)]
        heard += [(partition, account_of(partition), n + 1, total) for n, total in enumerate(sums)]
    place = rounds + random.Random(5).randrange(1, rounds - 1)
    partition, key, count, total = heard[place]
    if fault == "lost":
        del heard[place]
    elif fault == "last lost":
        del heard[-1]
    elif fault == "twice":
        heard.insert(place, heard[place])
    elif fault == "swapped":
        heard[place], heard[place - 1] = heard[place - 1], heard[place]
    elif fault == "wrong sum":
        heard[place] = partition, key, count, total + 1
    elif fault == "wrong key":
        heard[place] = partition, account_of(0), count, total
    for partition, key, count, total in heard:
        ledger.hear(partition, key, Stepped(key, count, total, 0.0, 0.0, "a.1"))
    assert bool(ledger.verdict([rounds] * PARTITIONS)) == bool(fault)


def test_stalls_are_summed_up_over_rounds() -> None:
    def stall(round_: int, *times: tuple[float, int], fault: str = "") -> Stall:
        found = [
            Silence(n, ms, moves, ms - 1 if moves else 0, {"started": ms} if moves else {})
            for n, (ms, moves) in enumerate(times)
        ]
        return Stall("join", round_, Window(0, 1), 2 + round_, round_, found, 3.0, fault)

    stalls = [stall(0, (100, 1), (7, 0)), stall(1, (300, 1), (9, 0)), stall(2, (200, 2), (8, 0), fault="lost one")]
    assert chain_medians(stalls) == {"started": 200}
    run = run_of(stalls=stalls)
    assert run.faults(of_peers=False) == ["join, round 2: lost one"]
    row = next(row for row in rows_of(shown(run)) if row[0] == "join")
    assert row == ["join", "1", "199", "299", "200", "300", "8", "9", "2-3", "0-1", "3", "2"]
    assert "1 moved up to 99 ms" in in_short(stalls[0])


def test_what_is_to_be_restored_is_the_same_for_a_seed() -> None:
    first, again = list(changes(1_000, 3)), list(changes(1_000, 3))
    assert first == again != list(changes(1_000, 4))
    assert {len(key) + len(value) for key, value in first} == {150}
    assert len({key for key, _ in first}) == 1_000
    assert {partition_of(key, 8) for key, _ in first} == set(range(8))


def test_a_wrong_restore_is_seen() -> None:
    state = dict(changes(100, 1))
    due = digest(state.items())
    assert fault_of(Restored(1, 1, 100, *digest(reversed(state.items()))), 100, due) == ""
    assert "99 of 100" in fault_of(Restored(1, 1, 99, *due), 100, due)
    key = next(iter(state))
    assert fault_of(Restored(1, 1, 100, *digest((state | {key: b"old"}).items())), 100, due)
    del state[key]
    assert "99 keys" in fault_of(Restored(1, 1, 100, *digest(state.items())), 100, due)


def test_restores_are_compared_within_a_round() -> None:
    found = [
        Restore(system, 1_000, 8, turn, seconds, seconds, 1.0, "")
        for turn, pair in enumerate([(1.0, 0.5), (10.0, 5.0), (2.0, 1.0)], 1)
        for system, seconds in zip(("handwritten", "engine"), pair, strict=True)
    ]
    text = shown(run_of(restore=found))
    row = next(line for line in text.splitlines() if "engine" in line)
    assert "2.00" in row
    assert "1,000" in row
