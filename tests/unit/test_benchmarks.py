"""The benchmarks: that the harness counts and judges rightly, the command, and the page made of what it found. Nothing
here asserts a speed."""

from __future__ import annotations

import argparse
import io
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks import page
from benchmarks.account.aims import aims_of_async, aims_of_drains, aims_of_latency
from benchmarks.account.report import held
from benchmarks.bench import Bench
from benchmarks.drain import DrainResult, middle_rate, stretch
from benchmarks.measures import PRESETS, measures
from benchmarks.reader import Gap, percentiles
from benchmarks.report import Entry, Run, machine_facts, show
from benchmarks.stalls.group import Window, silences
from benchmarks.steady import SteadyResult, behind_of
from benchmarks.systems import KINDS, REFERENCE, Failed, Kind, Launch, System, Unavailable, running
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


def run_of(**measured: list[Any]) -> Run:
    """A call of the command that found this, by measure."""
    entries = {name: [Entry(one, 0.5, 0.75, 2.0) for one in found] for name, found in measured.items()}
    return Run(machine_facts(1, list(measured)), entries)


def shown(run: Run) -> str:
    """What the console says."""
    console = Console(width=170, record=True, file=io.StringIO())
    show(console, run)
    return console.export_text()


def rows_of(text: str) -> list[list[str]]:
    """The tables' rows, cell by cell."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]


def drained(system: str, turn: int, rate: float, fault: str = "") -> DrainResult:
    return DrainResult(system, turn, fault, 1_000, rate, 1e6 / rate, 2.0, load_average=0.5)


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


DOCS = Path(__file__).parents[2] / "docs"


def late(system: str, turn: int, rate: int, p99: float) -> SteadyResult:
    return SteadyResult(system, turn, "", rate, seconds=5, p50=p99 / 4, p99=p99, highest=p99 * 2)


def whole() -> Run:
    """As of a call that measured backlogs and three rates."""
    drains = [drained(name, turn, rate * turn) for turn in (1, 2, 3)
              for name, rate in ((REFERENCE, 100_000), ("engine", 90_000.123456789))]  # fmt: skip
    steadies = [late(name, turn, rate, p99 + turn) for rate in (2_000, 5_000, 20_000) for turn in (1, 2)
                for name, p99 in ((REFERENCE, 40.0), ("engine", 20.0), ("gkes", 30.0))]  # fmt: skip
    return run_of(drain=drains, latency=steadies)


def written(folder: Path, *runs: Run) -> list[str]:
    """The files' names."""
    names = [folder / f"{number}.json" for number, _ in enumerate(runs)]
    for name, run in zip(names, runs, strict=True):
        run.write(name)
    return [str(name) for name in names]


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_line_counts_more_than_the_preset_which_gives_every_measure_its_sizes() -> None:
    sizes = {measure.name: set(measure.sizes) for measure in measures()}
    for preset in PRESETS:
        options = command.parse([f"--{preset}"] if preset != "default" else [])
        assert {"drain", "latency"} <= {measure.name for measure in options.measures} <= set(sizes)
        assert {name: set(vars(found)) for name, found in options.sizes.items()} == sizes
    options = command.parse(["drain", "--quick", "--drain-records", "7", "--rounds", "3", "--systems", "engine"])
    assert ([measure.name for measure in options.measures], options.systems) == (["drain"], ["engine"])
    assert (options.sizes["drain"].records, options.sizes["stalls"].rounds) == (7, 3)
    for wrong in (["speed"], ["--quick", "--full"]):
        with pytest.raises(SystemExit):
            command.parse(wrong)


class Absent(Kind):
    """A peer that is not there."""

    name, is_peer = "absent", True

    def launch(self, system: System, say: Any) -> Launch:
        raise Unavailable("no compiler here")


def test_systems_take_turns_and_one_that_fails_or_cannot_be_had_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "absent", Absent())
    options = argparse.Namespace(systems=["engine", "handwritten", "absent:x=1", "engine:switch=1"], seed=1)
    console = cast(Any, argparse.Namespace(print=lambda *_, **__: None, update=lambda *_: None))
    bench = Bench(options, {}, console, console)
    assert [system.label for system in bench.systems] == ["engine", "handwritten", "engine:switch=1"]
    assert bench.facts["not measured"] == {"absent:x=1": "no compiler here"}
    with pytest.raises(Failed, match="unknown system 'nonsense'"):
        bench.able(["nonsense"])

    def run(system: System, turn: int) -> str:
        if (system.label, turn) == ("handwritten", 2):
            raise Failed("gone")
        return f"{turn} {system.label}"

    assert list(bench.in_turn("x", 3, run, "{round} {system} {fault}".format)) == [
        "1 engine", "1 handwritten", "1 engine:switch=1",
        "2 handwritten failed: gone", "2 engine:switch=1", "2 engine",
        "3 engine", "3 engine:switch=1",
    ]  # fmt: skip
    faulty = run_of(drain=[drained("absent:x=1", 1, 5, "1,000 lost"), drained("engine", 1, 5)])
    assert (faulty.faults(of_peers=False), len(faulty.faults(of_peers=True))) == ([], 1), "a peer's fault is no failure"


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_tells_what_was_found(tmp_path: Path) -> None:
    run = whole()
    run.measured["drain"][1].found = drained("engine", 1, 1, "2 outputs out of turn | at <once>")
    stale = tmp_path / "results" / "stale.svg"
    stale.parent.mkdir()
    stale.touch()
    assert page.main([*written(tmp_path, run), "--docs", str(tmp_path)]) == 0
    text = (tmp_path / "results.md").read_text()
    pictures = sorted(path.name for path in (tmp_path / "results").glob("*.svg"))
    assert pictures == sorted(set(re.findall(r"\(results/(.*?\.svg)\)", text)))
    assert pictures == ["drain.svg", "latency-2000.svg", "latency-20000.svg", "latency-5000.svg"]
    assert "| engine | 225,000 (180,000; 270,000) | 0.90 (0.90; 0.90) |" in text
    assert "* engine: 2 outputs out of turn \\| at &lt;once>" in text
    assert 'Made by `make bench ARGS="drain latency"`: 6 runs' in text
    assert "| drain, to `handwritten:events=5000` | at least 1.2 | 0.90 (0.90; 0.90) | **no** |" in text
    assert "| p99 at 2,000/s | at most 30 ms | 21.5 (21.0; 22.0) ms | yes |" in text
    assert "* Live events in few and in many partitions: `make bench ARGS=live`" in text.partition("## Not measured")[2]
    (tmp_path / "results.md").unlink()
    assert page.main(["--docs", str(tmp_path)]) == 0, "made again from its figures"
    assert (tmp_path / "results.md").read_text() == text


def test_files_that_do_not_belong_together_make_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for fact in ("cpu", "code"):
        other = whole()
        other.facts[fact] = "another"
        assert page.main([*written(tmp_path, whole(), other), "--docs", str(tmp_path)]) == 1
        assert f"{fact} is " in capsys.readouterr().err
    (tmp_path / "x.json").write_text("[]")
    for name, reason in (("x.json", "Expected `object`"), ("missing.json", "missing.json")):
        assert page.main([str(tmp_path / name), "--docs", str(tmp_path)]) == 1
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "results.md").exists()


def test_aims_are_measured_against_the_best_of_a_peer_and_a_loop_of_as_many_slots() -> None:
    rates = {REFERENCE: 90, "engine": 100, "kafka-streams:commit_ms=100": 40, "kafka-streams:commit_ms=20": 80}
    slots = {"loop:slots=8": 100, "loop:slots=64": 400, "scheduler:slots=8": 90, "concurrency:slots=64": 200}
    aims = [*aims_of_drains([drained(name, 1, rate) for name, rate in rates.items()])]
    aims += aims_of_async([drained(name, 1, rate) for name, rate in slots.items()])
    found = {aim.what: (aim.found, aim.is_met) for aim in aims}
    assert found[f"drain, to `{REFERENCE}`"] == ("1.11", False)
    assert found["drain, to `kafka-streams:commit_ms=20`"] == ("1.25", False)
    assert found["async work, `scheduler:slots=8` to `loop:slots=8`"] == ("0.90", True)
    assert found["async work, `concurrency:slots=64` to `loop:slots=64`"] == ("0.50", False)


def test_a_run_that_fell_behind_is_compared_with_nothing() -> None:
    """Its latency grows with the length of the run, so a longer run would have met any aim."""
    mine, theirs = late("engine", 1, 20_000, 9.0), late("gkes", 1, 20_000, 90.0)
    behind = [msgspec.structs.replace(one, behind="could not") for one in (mine, theirs)]
    told = [
        next((aim.found, aim.is_met) for aim in aims_of_latency(found) if "gkes" in aim.what)
        for found in ([mine, theirs], [mine, behind[1]], behind)
    ]
    refused = ("`gkes` did not hold the rate, or was not right", None)
    assert told == [("0.10", True), refused, ("the rate was not held", False)]
    slow = msgspec.structs.replace(late("engine", 2, 2_000, 9.0), behind="could not")
    assert [aim.is_met for aim in aims_of_latency([late("engine", 1, 2_000, 9.0), slow])] == [False, False]


# -- the documentation -------------------------------------------------------------------------------------------------


def test_the_page_of_the_documentation_is_made_of_its_figures() -> None:
    made = page.page(page.read(DOCS / page.KEPT))
    for name, text in made.items():
        assert (DOCS / name).read_text() == text, f"{name}: make it again (python -m benchmarks page)"
    assert {f"results/{path.name}" for path in (DOCS / "results").glob("*.svg")} == set(made) - {"results.md"}


def test_every_measure_and_every_system_is_told_in_the_documentation() -> None:
    text = (DOCS / "performance.md").read_text()
    assert [measure.name for measure in measures() if f"`{measure.name}`" not in text] == []
    assert [kind for kind in KINDS if f"`{kind}" not in text] == []


def test_a_run_that_is_ended_keeps_what_it_has(tmp_path: Path) -> None:
    words = ["-m", "benchmarks", "instructions", "--quick", "--instructions-events", "4000", "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, *words], cwd=DOCS.parent, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*.json")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "what was measured until then is kept" in said
    (path,) = tmp_path.glob("*.json")
    assert [entry.found.system for entry in Run.read(path).measured["instructions"]] == ["handwritten"]
