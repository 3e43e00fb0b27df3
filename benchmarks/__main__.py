"""``python -m benchmarks``: one broker, several systems, interleaved; tables, and everything as JSON in ``out/bench``.

``python -m benchmarks page FILE...`` makes the page of the documentation from such files.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.bench import Bench
from benchmarks.measures import Measure, Options, measures
from benchmarks.report import Entry, Run, machine_facts, show
from benchmarks.systems import KINDS, Failed, System
from streams.errors import StreamsError


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. ``measures``: the objects, in their order."""
    known = {measure.name: measure for measure in measures()}
    parser = argparse.ArgumentParser(
        prog="benchmarks",
        description="Measures the event source against a hand-written confluent-kafka loop that does the same work, "
        "and other toolkits, side by side on one broker. `page FILE...` makes docs/results.md of what was found.",
        epilog="A system is NAME[@FOLDER][:OPTION=VALUE,...]: engine, handwritten:events=1000, engine@../other, "
        "engine:pool.batch_delay_seconds=0.005,client.linger.ms=1. In parentheses: the value with --quick / without "
        f"/ with --full. Systems: {', '.join(KINDS)}.",
    )
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(known)}; default: by preset")
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument("--quick", action="store_const", const="quick", dest="preset", help="about two minutes")
    preset.add_argument("--full", action="store_const", const="full", dest="preset", help="everything, and more of it")
    parser.set_defaults(preset="default")
    parser.add_argument("--systems", nargs="+", type=System.parse, metavar="SYSTEM", help="of drain, latency, memory")
    parser.add_argument("--rounds", type=int, help="of every measure, instead of its own number")
    parser.add_argument("--seed", type=int, default=20_130_101)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for JSON (default: %(default)s)")
    options = Options(parser)
    for measure in known.values():
        options.group(measure)
        measure.arguments(options)
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.measures) - set(known)
    if unknown:
        parser.error(f"unknown measure: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    for name, said in list(vars(parsed).items()):
        if parsed.rounds and name.endswith("_rounds") and said is None:
            setattr(parsed, name, parsed.rounds)
    options.filled(parsed, parsed.preset)
    parsed.systems = parsed.systems or default_systems(parsed.preset)
    named = set(parsed.measures)
    parsed.measures = [
        measure for measure in known.values() if (measure.name in named if named else parsed.preset in measure.presets)
    ]
    return parsed


def default_systems(preset: str) -> list[System]:
    """Reference and engine when it is to be quick; else everybody, by one setting each or, in full, by all."""
    kinds = {"quick": [KINDS["handwritten"], KINDS["engine"]]}.get(preset, list(KINDS.values()))
    labels = [label for kind in kinds for label in (kind.defaults if preset == "full" else kind.defaults[:1])]
    return [System.parse(label) for label in labels]


def without_folder(arguments: list[str]) -> list[str]:
    """What to call again somewhere else."""
    if "--out" not in arguments:
        return arguments
    place = arguments.index("--out")
    return arguments[:place] + arguments[place + 2 :]


def measure_all(bench: Bench, run: Run, path: Path) -> None:
    """Fill ``run``, and write it after every result. Raises ``Failed``."""
    for measure in bench.options.measures:
        found = measure.run(bench)
        while True:
            began, before = time.monotonic(), os.getloadavg()[0]
            one = next(found, None)
            if one is None:
                break
            entry = Entry(one, before, os.getloadavg()[0], time.monotonic() - began)
            run.measured.setdefault(measure.name, []).append(entry)
            run.write(path)
            bench.say(_line(measure, entry), markup=False)


def _line(measure: Measure[Any], entry: Entry) -> str:
    return f"{measure.in_short(entry.found)}  [load {entry.load_before:.1f}, {entry.seconds:.0f} s]"


def main(arguments: list[str]) -> int:
    """Measure, show, write. 1: something failed, or was not exactly once."""
    if arguments[:1] == ["page"]:
        from benchmarks import page

        return page.main(arguments[1:])
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    run = Run(machine_facts(options.seed, without_folder(arguments)))
    path = options.out / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}.json"
    console.print(
        f"machine: {run.facts['cpu']}, {run.facts['cores']} cores; load {run.facts['load_average_before']:.1f}"
    )
    signal.signal(signal.SIGTERM, _interrupted)
    failed = ""
    try:
        with console.status("getting ready") as status, Bench(options, run.facts, console, status) as bench:
            measure_all(bench, run, path)
    except (Failed, StreamsError) as error:
        failed = str(error)
    except KeyboardInterrupt:
        failed = "interrupted; what was measured until then is kept"
    run.write(path)
    show(console, run)
    console.print(f"everything measured: {path}")
    if failed:
        console.print(f"[red]{failed}[/]")
    return 1 if failed or run.faults(of_peers=False) else 0


def _interrupted(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever ends a whole group of processes says so twice
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
