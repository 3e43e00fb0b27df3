"""The command of the benchmarks, and the page made of what it found."""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from benchmarks import __main__ as command
from benchmarks import page
from benchmarks.account.aims import aims_of_async, aims_of_drains, aims_of_latency
from benchmarks.bench import Bench
from benchmarks.measures import PRESETS, measures
from benchmarks.report import Run
from benchmarks.steady import SteadyResult
from benchmarks.systems import KINDS, REFERENCE, Failed, Kind, Launch, System, Unavailable
from tests.unit.benchmarks_kit import drained, run_of

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


# --------------------------------------------------------------------------------------------------- the command


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


# ------------------------------------------------------------------------------------------------------ the page


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
    assert "| drain, to `handwritten:events=5000` | at least 1 | 0.90 (0.90; 0.90) | **no** |" in text
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
    assert found[f"drain, to `{REFERENCE}`"] == ("1.11", True)
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


# -------------------------------------------------------------------------------------------- tables and pictures


# ------------------------------------------------------------------------------------------------ the documentation


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
