"""The harness of the benchmarks: that it counts and judges rightly. Nothing here asserts a speed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Message

from benchmarks.account.report import held
from benchmarks.drain import middle_rate, stretch
from benchmarks.reader import Gap, percentiles
from benchmarks.spark.run import HEADERS, judged
from benchmarks.stalls.group import Window, silences
from benchmarks.steady import SteadyResult, behind_of
from benchmarks.systems import Failed, running
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
from tests.unit.benchmarks_kit import drained, rows_of, run_of, shown

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


Outputs = list[tuple[str, Balance]]


def swap(found: list[Any], first: int, second: int) -> None:
    found[first], found[second] = found[second], found[first]


FAULTS: dict[str, Callable[[Outputs, list[int]], object]] = {
    "lost": lambda found, mine: found.pop(mine[0]),
    "last lost": lambda found, mine: found.pop(),
    "twice": lambda found, mine: found.insert(mine[-1] + 1, found[mine[-1]]),
    "swapped": lambda found, mine: swap(found, mine[0], mine[1]),
    "wrong sum": lambda found, mine: found.append(
        (found[mine[-1]][0], msgspec.structs.replace(found.pop(mine[-1])[1], cents=1))
    ),
    "wrong key": lambda found, mine: found.__setitem__(mine[0], ("another", found[mine[0]][1])),
    "other seed": lambda found, mine: None,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("written", [0, EVENTS + 1_000], ids=["complete", "stopped"])
def test_the_judge_sees_every_fault(fault: str, written: int) -> None:
    found = outputs(3)
    account = found[random.Random(3).randrange(10_000)][0]
    FAULTS[fault](found, [number for number, (key, _) in enumerate(found) if key == account])
    assert verdict(found, 4 if fault == "other seed" else 3, EVENTS, written) != ""


# -- Spark -------------------------------------------------------------------------------------------------------------


def of_spark(number: int, key: bytes = b"", end: bytes = b"", headers: Any = HEADERS) -> Any:
    """A record of a right side: a key's numbers rise."""
    value = b'{"id":%d,"account":"a"}' % number + end
    return Message(topic="t", key=key or b"k%d" % (number % 7), value=value, headers=headers)


@pytest.mark.parametrize("fault", ["", "lost", "twice", "other value", "other key", "no headers", "swapped"])
def test_the_judge_of_spark_sees_every_fault(fault: str) -> None:
    found = [of_spark(number) for number in range(200)]
    due = len(found), sum(zlib.crc32(one.key()) for one in found), sum(zlib.crc32(one.value()) for one in found)
    place = random.Random(7).randrange(100)
    one = found[place]
    found[place : place + 1] = {
        "lost": [],
        "twice": [one, one],
        "other value": [of_spark(place, end=b" ")],
        "other key": [of_spark(place, key=b"k9")],
        "no headers": [of_spark(place, headers=None)],
    }.get(fault, [one])
    if fault == "swapped":
        swap(found, place, place + 7)
    assert bool(judged(found, due, in_order=True)) == bool(fault)
    assert not judged(found, due, in_order=False) or fault != "swapped"


# -- the harness -------------------------------------------------------------------------------------------------------


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


def test_ratios_are_taken_within_a_round_and_the_first_one_does_not_count() -> None:
    rates = [(7, 700), (100, 200), (1, 2), (50, 25)]
    found = [
        drained(name, turn, rate) for turn, pair in enumerate(rates) for name, rate in zip("ab", pair, strict=True)
    ]
    found.append(drained("b", 4, 1_000))
    assert ratios(found, "b", "a", lambda one: one.per_second) == [2.0, 2.0, 0.5]


def test_a_run_with_a_fault_has_no_rate() -> None:
    run = run_of(drain=[drained("a", 1, 10), drained("b", 1, 20, "2 outputs out of turn"), drained("c", 1, 5)])
    assert run.faults(of_peers=False) == ["b: 2 outputs out of turn"]
    text = shown(run)
    assert "not right: b: 2 outputs out of turn" in text
    rows = {row[0]: row[1:] for row in rows_of(text)}
    assert rows["c"][:2] == ["5", "0.50"]
    assert (rows["b"][0], rows["b"][-1]) == ("-", "no: 1 of 1 runs")


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


# -- silences ----------------------------------------------------------------------------------------------------------


def test_a_silence_counts_as_far_as_it_was_watched_and_moves_are_changes_of_the_writer() -> None:
    gaps = [Gap(0, 0.0, 0.9), Gap(0, 1.1, 1.5, True), Gap(0, 1.5, 1.7, True), Gap(0, 1.7, 3.0), Gap(3, 1.0, 1.2)]

    def found(since: float, until: float) -> dict[int, tuple[float, int, float]]:
        every = silences(gaps, Window(since, until))
        return {one.partition: (one.milliseconds, one.moves, one.at_move) for one in every if one.milliseconds}

    assert found(1.0, 1.6) == {0: (400.0, 1, 400.0), 3: (200.0, 0, 0.0)}
    assert found(1.0, 2.5) == {0: (800.0, 2, 400.0), 3: (200.0, 0, 0.0)}, "as far as it was watched"
    assert found(2.5, 3.5) == {0: (1300.0, 0, 0.0)}, "from before the window"
    assert found(5.0, 6.0) == {}


# -- fixed rates -------------------------------------------------------------------------------------------------------


def test_whether_a_rate_was_held() -> None:
    assert behind_of(900, 50) == ""
    assert "could not keep up" in behind_of(1_500, 50)
    assert "the generator" in behind_of(5_000, 3_000), "nothing is known about the system"
    fast, slow = (SteadyResult("a", turn, rate=500, behind=text) for turn, text in ((1, ""), (2, "late")))
    assert held([fast, slow]) == [fast]
