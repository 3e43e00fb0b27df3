"""``python -m benchmarks page FILE...``: ``docs/results.md`` and its pictures, from the results of calls.

Several files are put together: parts of the whole that were measured one after the other, on the same machine, and each
measure by the same code. They are kept beside the page (``docs/results/results.json``), and the page is made from that
file alone, so it can be made again at any time.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.drawing import svg
from benchmarks.measures import Aim, Measure, measures
from benchmarks.report import Entry, Run
from benchmarks.tables import markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
KEPT = "results/results.json"
SAME = ("cpu", "cores", "memory_mib", "python", "librdkafka")
"""Facts that must be the same in all files; those of one measure must have ``code`` in common, too."""
FACTS = (
    "cpu", "cores", "memory_mib", "system", "kafka-event-source", "commit", "python", "confluent_kafka", "librdkafka",
    "msgspec", "kafka", "java", "seed",
)  # fmt: skip
"""Those of the page."""
ROUNDS_APART = 1_000
"""Between the rounds of one file and those of the next, so that none are paired."""

HEAD = """\
# Results, measured

<!-- Written by `python -m benchmarks page`: a change here is lost. -->

The event source beside a loop written by hand with confluent-kafka that does the same work, and beside other
toolkits. Medians stand before the least and the most. **Ratios are what counts**: systems, broker, generator and
reader share one machine, and absolute figures move by a factor of two from hour to hour. A run with a fault has no
figure. Systems called `engine` run the [compiled hot path](installation.md#the-compiled-hot-path), `engine@../plain` is
plain Python. The workloads, the method and its limits: [Performance](performance.md). All single figures:
[results.json](results/results.json). A command is that of the commit beside it, which may know more measures than are
left. What those found stands under [measured once](internals/performance.md#measured-once).
"""


class Mixed(Exception):
    """Files of different machines or of different code do not make one page, and other files make none."""


def main(arguments: list[str]) -> int:
    """Write the page. 1: the files cannot be put together."""
    parser = argparse.ArgumentParser(prog="benchmarks page", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="JSON of calls, in the order of measuring; none: as before")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page (default: the checkout's)")
    options = parser.parse_args(arguments)
    kept = options.docs / KEPT
    try:
        if options.files:
            runs = [_read(path) for path in options.files]
            check(runs)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, runs)) + b"\n]\n")
        files = page(read(kept))
    except (OSError, Mixed) as error:
        print(f"benchmarks page: {error}", file=sys.stderr)
        return 1
    for path in kept.parent.glob("*.svg"):
        if f"results/{path.name}" not in files:
            path.unlink()
    for name, text in files.items():
        (options.docs / name).write_text(text)
    print(f"{options.docs / 'results.md'}: {len(files) - 1} pictures")
    return 0


def _read(path: Path) -> Run:
    try:
        return Run.read(path)
    except msgspec.MsgspecError as error:
        raise Mixed(f"{path} is no file of the benchmarks, or of another version of them: {error}") from error


def read(kept: Path) -> list[Run]:
    """Read the results that are kept beside the page."""
    runs = msgspec.json.decode(kept.read_bytes(), type=list[Run])
    for run in runs:
        run.decode()
    return runs


def check(runs: Sequence[Run]) -> None:
    """Check that the files belong together. Raises ``Mixed``."""
    same = [(name, runs) for name in SAME]
    same += [("code", [run for run in runs if measure.name in run.measured]) for measure in measures()]
    for name, alike in same:
        values = sorted({str(run.facts.get(name)) for run in alike})
        if len(values) > 1:
            raise Mixed(f"these files do not belong together: {name} is {' and '.join(values)}")


def page(runs: Sequence[Run]) -> dict[str, str]:
    """Make every file, by its name in the folder of the documentation."""
    sections, pictures, aims = [], {}, list[Aim]()
    for measure in measures():
        found = together(measure, runs)
        if not found:
            continue
        aims += measure.aims(found)
        parts = [f"## {measure.title}", measure.about, _made_by(measure, runs)]
        for plot in (plot for plot in measure.plots(found) if plot):
            name = f"results/{plot.name}.svg"
            pictures[name] = svg(plot)
            parts.append(f"![{plot.alt}]({name})")
        for table in measure.tables(found):
            parts += [markdown(table), *([str(table.caption)] if table.caption else [])]
        parts += _faults(measure, found)
        sections.append("\n\n".join(parts) + "\n")
    text = "\n".join([HEAD, *_aims(aims), _facts(runs), *sections, *_missing(runs)])
    return {"results.md": text, **pictures}


def _missing(runs: Sequence[Run]) -> Iterator[str]:
    """List the measures without a result."""
    missing = [measure for measure in measures() if not together(measure, runs)]
    if rows := [f"* {measure.title}: `make bench ARGS={measure.name}`" for measure in missing]:
        yield "\n".join(["## Not measured for this page", "", *rows, ""])


def together(measure: Measure[Any], runs: Sequence[Run]) -> list[Any]:
    """Collect the results of all calls of a measure."""
    return [
        measure.renumbered(found, number * ROUNDS_APART)
        for number, run in enumerate(runs)
        for found in run.results(measure)
    ]


def _made_by(measure: Measure[Any], runs: Sequence[Run]) -> str:
    told = []
    for run in runs:
        entries: list[Entry] = run.measured.get(measure.name, [])
        if entries:
            loads = [load for entry in entries for load in (entry.load_before, entry.load_after)]
            minutes = sum(entry.seconds for entry in entries) / 60
            command = f'make bench ARGS="{shlex.join(run.facts["arguments"])}"'
            load, commit = f"load {min(loads):.1f} to {max(loads):.1f}", run.facts.get("commit", "")
            told.append(f"`{command}`: {len(entries)} runs in {max(minutes, 0.1):.1f} minutes, {load}, commit {commit}")
    return f"Made by {'; '.join(told)}."


def _faults(measure: Measure[Any], found: Sequence[Any]) -> Iterator[str]:
    faults = list(dict.fromkeys(fault for one in found if (fault := measure.fault(one))))
    if faults:
        yield "What was not right:\n\n" + "\n".join(f"* {_plain(fault)}" for fault in faults)


def _aims(aims: Sequence[Aim]) -> Iterator[str]:
    if aims:
        words = {True: "yes", False: "**no**", None: "-"}
        rows = [f"| {aim.what} | {aim.aim} | {aim.found} | {words[aim.is_met]} |" for aim in aims]
        yield "\n".join(["## Aims", "", "| | aim | found | met |", "|---|--:|--:|---|", *rows, ""])


def _facts(runs: Sequence[Run]) -> str:
    """Show the circumstances: each with all its values, peers and their versions last."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        for name in FACTS:
            rows.setdefault(name, []).append(str(run.facts.get(name, "")))
        for name, versions in run.facts.get("peers", {}).items():
            told = ", ".join(f"{what} {version}" for what, version in versions.items())
            rows.setdefault(f"`{name}`", []).append(told)
        for name, why in run.facts.get("not measured", {}).items():
            rows.setdefault(f"not measured: `{name}`", []).append(why)
    lines = [f"| {name} | {_plain(', '.join(filter(None, dict.fromkeys(values))))} |" for name, values in rows.items()]
    return "\n".join(["## Machine and versions", "", "| | |", "|---|---|", *lines, ""])


def _plain(text: str) -> str:
    first, *more = text.strip().splitlines() or [""]
    return first.replace("|", "\\|").replace("<", "&lt;") + (" …" if more else "")
