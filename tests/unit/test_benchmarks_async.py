"""The benchmark of work ahead of its turn: that it judges rightly and compares within a round. No speed is asserted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.async_work import quix_environment
from benchmarks.async_work.latency import Latency
from benchmarks.async_work.measure import AsyncRun
from benchmarks.async_work.price import BARE, WAYS, Price, price
from benchmarks.async_work.quix_environment import NoQuixstreams, quixstreams_python, versions
from benchmarks.async_work.reader import longest_gap
from benchmarks.async_work.report import ratio, reference_of
from benchmarks.async_work.run import find_quixstreams, in_short
from benchmarks.async_work.systems import all_of
from benchmarks.async_work.throughput import Throughput
from benchmarks.async_work.workload import (
    SLOW_MS,
    Answered,
    Ask,
    Asked,
    Judge,
    Plan,
    partition_of,
    shares,
    told,
)
from benchmarks.committed import percentiles
from streams import EventSource
from tests.unit.benchmarks_kit import rows_of, run_of, shown


def asks(plan: Plan, events: int) -> list[Ask]:
    return list(islice(plan.asks(), events))


def outputs(plan: Plan, events: int) -> list[tuple[str, Answered]]:
    """What a right system sends."""
    return [(ask.key, Answered(ask.key, ask.number, ask.number, 0.0)) for ask in asks(plan, events)]


def verdict(heard: list[tuple[str, Answered]], due: dict[str, int]) -> str:
    judge = Judge()
    for key, answer in heard:
        judge.hear(key, answer)
    return judge.verdict(due)


def test_a_plan_is_the_same_for_a_seed_and_has_its_share_of_slow_events() -> None:
    plan = Plan(7)
    found = asks(plan, 20_000)
    assert found == asks(Plan(7), 20_000) != asks(Plan(8), 20_000)
    assert 100 < sum(ask.milliseconds == SLOW_MS for ask in found) < 300
    assert [ask.partition for ask in found[:6]] == [0, 1, 2, 3, 0, 1]
    assert all(partition_of(ask.key) == ask.partition for ask in found)
    assert len({ask.key for ask in found}) == 1_000
    one = asks(Plan(7, slow_share=0, slow_at=8, slow_ms=3_000), 100)
    assert [(n, ask.partition) for n, ask in enumerate(one) if ask.milliseconds != 5] == [(8, 0)]
    (topic, key, value, partition), *_ = told(found, "t")
    event = msgspec.json.decode(value, type=Asked)
    assert (topic, key.decode(), event.number, partition) == ("t", event.key, 1, 0)


def test_what_is_due_follows_from_how_far_each_partition_is() -> None:
    plan, handled = Plan(3), {0: 200, 1: 0, 2: 371, 3: 5}
    left, due = dict(handled), Counter[str]()
    for ask in asks(plan, 4_000):
        if left[ask.partition]:
            left[ask.partition] -= 1
            due[ask.key] += 1
    assert plan.due(handled) == dict(due)
    assert sum(plan.due(shares(1_001)).values()) == 1_001
    assert plan.due({0: 0}) == {}


@pytest.mark.parametrize(
    "fault", ["", "lost", "last lost", "twice", "swapped", "state lost", "wrong key", "not committed", "more committed"]
)
def test_the_judge_sees_every_fault(fault: str) -> None:
    plan, events = Plan(11), 8_000
    heard, due = outputs(plan, events), plan.due(shares(events))
    key = heard[random.Random(11).randrange(events)][0]
    mine = [number for number, (heard_key, _) in enumerate(heard) if heard_key == key]
    if fault == "lost":
        del heard[mine[0]]
    elif fault == "last lost":
        del heard[mine[-1]]
    elif fault == "twice":
        heard.insert(mine[-1] + 1, heard[mine[-1]])
    elif fault == "swapped":
        heard[mine[0]], heard[mine[1]] = heard[mine[1]], heard[mine[0]]
    elif fault == "state lost":
        heard[mine[1]] = key, msgspec.structs.replace(heard[mine[1]][1], count=1)
    elif fault == "wrong key":
        heard[mine[0]] = "somebody", heard[mine[0]][1]
    elif fault == "not committed":
        due = plan.due(shares(events - 1))
    elif fault == "more committed":
        due = plan.due(shares(events + 1))
    assert bool(verdict(heard, due)) == bool(fault)


def test_gaps_and_percentiles() -> None:
    assert longest_gap([1.0, 1.5, 1.75]) == 500
    assert longest_gap([1.0]) == longest_gap([]) == 0
    assert percentiles([float(n) for n in reversed(range(100))]) == (50, 90, 99, 99)
    assert percentiles([]) == (0, 0, 0, 0)


def moved(system: str, turn: int, rate: float, fault: str = "") -> Throughput:
    return Throughput(system, turn, 100, rate, 50.0, 1.0, fault)


def late(system: str, turn: int, slow_ms: int = 0, gaps: tuple[float, ...] = (1, 2, 3, 4)) -> Latency:
    return Latency(system, turn, 40, slow_ms, 10.0 * turn, 20, 30.0 * turn, 40, list(gaps), 1, 2, 0.5, "")


def test_every_system_is_compared_with_the_loop_of_its_concurrency() -> None:
    systems = [system.label for system in all_of((64, 16), Path("python"))]
    assert len(systems) == len(set(systems)) == 8
    assert {name: reference_of(name, systems) for name in systems if "quix" not in name} == {
        "loop, 64": "loop, 64", "scheduler, 64": "loop, 64", "handler, 64": "loop, 64",
        "loop, 16": "loop, 16", "scheduler, 16": "loop, 16", "handler, 16": "loop, 16",
    }  # fmt: skip
    assert {reference_of(name, systems) for name in systems if "quix" in name} == {"loop, 64"}
    assert not any("quix" in system.label for system in all_of((64,), None))


def test_ratios_are_taken_within_a_round() -> None:
    runs = [moved(name, turn, rate) for turn, pair in enumerate([(100, 200), (1, 2), (50, 25)], 1)
            for name, rate in zip(("loop, 8", "scheduler, 8"), pair, strict=True)]  # fmt: skip
    assert ratio(runs, "scheduler, 8", "loop, 8") == 2.0
    assert ratio(runs[1:], "scheduler, 8", "loop, 8") == 1.25, "the round that only one side has does not count"
    assert ratio(runs, "scheduler, 8", "nobody") == 0.0


def as_found(part: str, *runs: Throughput | Latency | Price) -> list[AsyncRun]:
    return [AsyncRun(part, **{type(run).__name__.lower(): run}) for run in runs]  # type: ignore[arg-type]


def test_a_report_tells_medians_and_faults() -> None:
    found = as_found(
        "throughputs", moved("loop, 8", 1, 1_000), moved("handler, 8", 1, 1_500, "2 outputs out of turn"),
        moved("scheduler, 8", 1, 1_500),
    )  # fmt: skip
    found += as_found("latencies", *(late("loop, 8", turn) for turn in (1, 2, 6)))
    found += as_found(
        "gaps", late("scheduler, 8", 1, 500, (501, 20, 30, 40)), late("scheduler, 8", 2, 500, (503, 20, 77, 40))
    )
    run = run_of(**{"async": found})
    assert run.faults(of_peers=False) == ["async work, handler, 8, round 1: 2 outputs out of turn"]
    rows = rows_of(shown(run))
    assert ["scheduler, 8", "1,500", "1,500", "1,500", "1.50", "loop, 8", "50", "yes"] in rows
    assert ["handler, 8", "-", "-", "-", "-", "-", "-", "no"] in rows
    assert ["loop, 8", "20", "10", "60", "20", "60", "30", "180", "40", "2", "yes"] in rows
    assert ["scheduler, 8", "500", "502", "20", "54", "40", "77", "yes"] in rows
    assert all("right" in in_short(one.run) for one in (found[0], found[-1]))


def test_calls_that_are_saved_are_told() -> None:
    alone, together = moved("one event a call", 1, 800), moved("batcher", 1, 8_000)
    found = as_found("batches", msgspec.structs.replace(alone, calls=100), msgspec.structs.replace(together, calls=4))
    found += as_found("prices", *(Price("plain", turn, 10.0 * turn, 5.0, 1.0) for turn in (1, 2, 6)))
    rows = rows_of(shown(run_of(**{"async": found})))
    assert ["one event a call", "800", "800", "800", "1.00", "1.0", "0%", "yes"] in rows
    assert ["batcher", "8,000", "8,000", "8,000", "10.00", "25.0", "96%", "yes"] in rows
    assert ["plain", "20.0", "10.0", "60.0", "5.0", "5.0", "5.0"] in rows


@pytest.mark.parametrize("way", [*WAYS, BARE])
def test_every_way_has_its_price_and_handles_everything(way: str) -> None:
    found = price(way, Plan(3), 90, 40, 1)
    assert (found.way, found.fault) == (way, "")
    assert min(found.us, found.us_without_gc) > 0


def test_a_price_of_something_that_was_not_done_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(source: EventSource[Any]) -> None:
        source.register_event_type(Asked, lambda ctx, event: None)

    monkeypatch.setitem(WAYS, "nothing", nothing)
    assert price("nothing", Plan(3), 20, 20, 1).fault == "[0, 0] outputs for 20 events"
    run = run_of(**{"async": as_found("prices", Price("nothing", 1, 1.0, 1.0, 1.0, "0 outputs"))})
    assert run.faults(of_peers=False) == ["async work, nothing, round 1: 0 outputs"]


def test_quixstreams_is_installed_once_and_never_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> bytes:
        ran.append(command)
        if "venv" in command:
            python = Path(command[-1], "bin", "python")
            python.parent.mkdir(parents=True)
            python.touch()
        return b'{"quixstreams":"1"}'

    monkeypatch.setenv("KES_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(quix_environment, "_run", run)
    said: list[str] = []
    python = quixstreams_python(said.append)
    assert python.is_relative_to(tmp_path)
    assert len(said) == 2
    assert ran[1][0] == str(python), "its own pip"
    assert quixstreams_python(said.append) == python
    assert (len(ran), len(said)) == (2, 2)
    assert versions(python) == {"quixstreams": "1"}


def test_an_install_that_broke_off_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KES_CACHE_DIR", str(tmp_path))

    def run(command: list[str]) -> bytes:
        if "pip" in command:
            raise NoQuixstreams("no network")
        return b""

    monkeypatch.setattr(quix_environment, "_run", run)
    for _ in range(2):
        facts: dict[str, object] = {}
        assert find_quixstreams(lambda _: None, facts) is None
        assert facts == {"quixstreams": "not measured: no network"}


def test_why_an_environment_could_not_be_made_is_told() -> None:
    with pytest.raises(NoQuixstreams, match="ended with code 3; it said: the reason"):
        quix_environment._run([sys.executable, "-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(NoQuixstreams, match="no-such-thing"):
        quix_environment._run(["/no-such-thing"])


def test_what_runs_in_the_other_environment_needs_nothing_of_this_project() -> None:
    """Only the standard library and quixstreams, or it could not start there."""
    code = "import sys, types; sys.modules['quixstreams'] = types.SimpleNamespace(Application=None)\n"
    code += "before = set(sys.modules)\nimport benchmarks.async_work.quix as q\n"
    code += "import json; print(json.dumps(sorted({m.partition('.')[0] for m in set(sys.modules) - before})))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True)
    assert set(json.loads(done.stdout)) - set(sys.stdlib_module_names) == {"benchmarks"}
