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

from rich.console import Console

from benchmarks.bench import Bench
from benchmarks.measures import PRESETS, measures
from benchmarks.report import Entry, Run, machine_facts, show
from benchmarks.systems import KINDS, Failed
from streams.errors import StreamsError


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. ``measures``: the objects, in their order; ``sizes``: a namespace for each, by name."""
    known = {measure.name: measure for measure in measures()}
    parser = argparse.ArgumentParser(
        prog="benchmarks",
        description="Measures the event source against a hand-written confluent-kafka loop that does the same work, "
        "and other toolkits, side by side on one broker. `page FILE...` makes docs/results.md of the results.",
        epilog="A system is NAME[@FOLDER][:OPTION=VALUE,...]: engine, handwritten:events=1000, engine@../other, "
        "engine:pool.batch_delay_seconds=0.005,client.linger.ms=1. In parentheses: the value with --quick / without "
        f"/ with --full. Systems: {', '.join(KINDS)}.",
    )
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(known)}; default: by preset")
    preset = parser.add_mutually_exclusive_group()
    preset.add_argument("--quick", action="store_const", const="quick", dest="preset", help="about two minutes")
    preset.add_argument("--full", action="store_const", const="full", dest="preset", help="everything, and more of it")
    parser.set_defaults(preset="default")
    parser.add_argument("--systems", nargs="+", metavar="SYSTEM", help="of drain and latency")
    parser.add_argument("--rounds", type=int, help="of every measure, instead of its own number")
    parser.add_argument("--seed", type=int, default=20_130_101)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for JSON (default: %(default)s)")
    for measure in known.values():
        group = parser.add_argument_group(measure.name, measure.title)
        for name, values in measure.sizes.items():
            one = values[0][0] if isinstance(values[0], list) else values[0]
            group.add_argument(
                f"--{measure.name}-{name}",
                metavar=name.upper(),
                type=type(one),
                nargs="+" if isinstance(values[0], list) else None,
                help=f"({' / '.join(map(_plain, values))})",
            )
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.measures) - set(known)
    if unknown:
        parser.error(f"unknown measure: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    place = PRESETS.index(parsed.preset)
    parsed.sizes = {}
    for measure in known.values():
        chosen = {name: values[place] for name, values in measure.sizes.items()}
        if parsed.rounds and "rounds" in chosen:
            chosen["rounds"] = parsed.rounds
        given = {name: getattr(parsed, f"{measure.name}_{name}") for name in chosen}
        chosen |= {name: value for name, value in given.items() if value is not None}
        parsed.sizes[measure.name] = argparse.Namespace(**chosen)
    kinds = [KINDS["handwritten"], KINDS["engine"]] if parsed.preset == "quick" else list(KINDS.values())
    most = None if parsed.preset == "full" else 1
    parsed.systems = parsed.systems or [label for kind in kinds for label in kind.defaults[:most]]
    named = set(parsed.measures)
    parsed.measures = [
        measure for measure in known.values() if (measure.name in named if named else parsed.preset in measure.presets)
    ]
    return parsed


def _plain(value: object) -> str:
    return " ".join(map(_plain, value)) if isinstance(value, list) else str(value)


def measure_all(bench: Bench, run: Run, path: Path) -> None:
    """Fill ``run``, and write it after every result. Raises ``Failed``."""
    for measure in bench.options.measures:
        began, before = time.monotonic(), os.getloadavg()[0]
        for one in measure.run(bench):
            entry = Entry(one, before, os.getloadavg()[0], time.monotonic() - began)
            run.measured.setdefault(measure.name, []).append(entry)
            run.write(path)
            line = f"{measure.in_short(one)}  [load {before:.1f}, {entry.seconds:.0f} s]"
            bench.say(line, markup=False)
            began, before = time.monotonic(), os.getloadavg()[0]


def main(arguments: list[str]) -> int:
    """Measure, show, write. 1: something failed, or was not exactly once."""
    if arguments[:1] == ["page"]:
        from benchmarks import page

        return page.main(arguments[1:])
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    place = arguments.index("--out") if "--out" in arguments else len(arguments)  # of this machine alone
    run = Run(machine_facts(options.seed, arguments[:place] + arguments[place + 2 :]))
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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a signal to a whole group of processes comes twice
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
