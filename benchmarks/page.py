"""``python -m benchmarks page FILE...``: ``docs/results.md`` and its pictures, from what calls of the command found.

Several files are put together: parts of the whole that were measured one after the other, by the same code on the same
machine. What the page needs of them is kept beside it (``docs/results/results.json``), and the page is made from that
alone, so anybody can make it again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.drawing import alt, svg
from benchmarks.measures import Aim, Measure, measures
from benchmarks.report import Entry, Run
from benchmarks.systems import KINDS
from benchmarks.tables import markdown

DOCS = Path(__file__).resolve().parents[1] / "docs"
KEPT = "results/results.json"
DIGITS = 6
"""Of every figure, in what is kept."""
SAME = ("cpu", "cores", "memory_mib", "python", "librdkafka", "code")
"""Facts that must be the same in all files."""
ROUNDS_APART = 1_000
"""Between the rounds of one file and those of the next, so that none are paired."""

HEAD = """\
# Results, measured

<!-- Written by `python -m benchmarks page`: a change here is lost. -->

The event source beside a loop written by hand with confluent-kafka that does the same work, and beside other
toolkits: one broker, every system in a process of its own, in turn, round by round. What is shown is the median,
and in parentheses the least and the most. **Ratios are what counts**: broker, systems, generator and reader share
one machine, and absolute figures move by a factor of two from hour to hour. A ratio is taken within a round, to
`handwritten:events=5000` unless a column says otherwise, and its median is told.

Before a rate or a time is told, everything that a system sent is read back and judged: each event once, in the
order of its key, with the right state. A run with a fault has no figure, and its fault is told. What the workloads
are, and how to do this again: [Performance](performance.md). All single figures:
[results.json](results/results.json).
"""

LIMITS = """\
## Limits

* One machine, one broker, one replica, the loop-back interface: there is no network here, and no replication to
  wait for. Who is slow because of either is not seen.
* Systems, broker, generator and reader share the processors. A system that costs the broker less gets more of the
  machine; that is part of what is measured, and would weigh less on a broker of its own.
* Runs are short (seconds to a minute) and rounds are few. The least and the most are the whole range that was seen,
  not a confidence interval.
* Virtual machines have little time to warm up: uncounted runs come first, for the broker (two minutes or so); a peer
  in Java compiles its own code during its run, and that is part of its processor time.
* Every system has the settings that are written at its name, and otherwise its defaults. Whoever knows one of them
  better can do better by it: the programs are in `benchmarks/`, and `make bench` runs them.
"""


class Mixed(Exception):
    """Files of different machines or of different code do not make one page, and other files make none."""


def main(arguments: list[str]) -> int:
    """Write what differs. 1: the files cannot be put together."""
    parser = argparse.ArgumentParser(prog="benchmarks page", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="JSON of calls, in the order of measuring; none: as before")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the page (default: the checkout's)")
    options = parser.parse_args(arguments)
    kept = options.docs / KEPT
    try:
        if options.files:
            runs = compact(map(_read, options.files))
            check(runs, options.files)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(b"[\n" + b",\n".join(map(_encode, runs)) + b"\n]\n")
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
    """What is kept beside the page."""
    runs = msgspec.json.decode(kept.read_bytes(), type=list[Run])
    for run in runs:
        run.decode()
    return runs


def check(runs: Sequence[Run], files: Sequence[Path]) -> None:
    """Raises ``Mixed``."""
    for name in SAME:
        by_value: dict[str, list[str]] = {}
        for run, path in zip(runs, files, strict=True):
            by_value.setdefault(str(run.facts.get(name)), []).append(path.name)
        if len(by_value) > 1:
            told = "; ".join(f"{value} in {', '.join(names)}" for value, names in by_value.items())
            raise Mixed(f"these files do not belong together: {name} is {told}")


def compact(runs: Iterable[Run]) -> list[Run]:
    """The same with shorter numbers."""
    return [msgspec.convert(_rounded(msgspec.to_builtins(run)), Run) for run in runs]


def page(runs: Sequence[Run]) -> dict[str, str]:
    """Every file, by its name in the folder of the documentation, with what it should hold."""
    sections, pictures, aims = [], {}, list[Aim]()
    for measure in measures():
        found = together(measure, runs)
        if not found:
            continue
        aims += measure.aims(found)
        parts = [f"## {measure.title}", measure.about, _made_by(measure, runs)]
        for plot in (plot for plot in measure.plots(found) if plot):
            name = f"results/{measure.name}-{plot.name}.svg".replace(f"{measure.name}-{measure.name}", measure.name)
            pictures[name] = svg(plot)
            parts.append(f"![{alt(plot)}]({name})")
        for table in measure.tables(found):
            parts += [markdown(table), *([str(table.caption)] if table.caption else [])]
        parts += _faults(measure, found)
        sections.append("\n\n".join(parts) + "\n")
    text = "\n".join([HEAD, *_aims(aims), _systems(runs), _facts(runs), *sections, *_missing(runs), LIMITS])
    return {"results.md": text, **pictures}


def _missing(runs: Sequence[Run]) -> Iterator[str]:
    """What these files say nothing about."""
    rows = [
        f"* {measure.title}: `make bench ARGS={measure.name}`"
        for measure in measures()
        if not any(run.measured.get(measure.name) for run in runs)
    ]
    if rows:
        yield "\n".join(["## Not measured for this page", "", *rows, ""])


def together(measure: Measure[Any], runs: Sequence[Run]) -> list[Any]:
    """What all calls found of a measure."""
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
            told.append(
                f"`{_command(run)}`: {len(entries)} runs in {max(minutes, 0.1):.1f} minutes, "
                f"load {min(loads):.1f} to {max(loads):.1f}"
            )
    return f"Made by {'; '.join(told)}."


def _command(run: Run) -> str:
    arguments = shlex.join(run.facts["arguments"])
    return (
        f'make bench ARGS="{arguments}"'
        if " " in arguments
        else f"make bench {arguments and f'ARGS={arguments}'}".strip()
    )


def _faults(measure: Measure[Any], found: Sequence[Any]) -> Iterator[str]:
    faults = list(dict.fromkeys(fault for one in found if (fault := measure.fault(one))))
    if faults:
        yield "What was not right:\n\n" + "\n".join(f"* {_plain(fault)}" for fault in faults)


def _aims(aims: Sequence[Aim]) -> Iterator[str]:
    if aims:
        words = {True: "yes", False: "**no**", None: "-"}
        rows = [f"| {aim.what} | {aim.aim} | {aim.found} | {words[aim.is_met]} |" for aim in aims]
        yield "\n".join(["## Aims", "", "| | aim | found | met |", "|---|--:|--:|---|", *rows, ""])


def _systems(runs: Sequence[Run]) -> str:
    """What took part in the account workload."""
    labels = {
        str(entry.found.system)
        for run in runs
        for entries in run.measured.values()
        for entry in entries
        if hasattr(entry.found, "system")
    }
    took_part = {label.partition(":")[0].partition("@")[0] for label in labels}
    rows = [f"| `{name}` | {kind.about} |" for name, kind in KINDS.items() if name in took_part and kind.about]
    return "\n".join(["## Systems", "", "| | |", "|---|---|", *rows, ""]) if rows else ""


def _facts(runs: Sequence[Run]) -> str:
    facts = {name: value for run in runs for name, value in run.facts.items()}
    commits = dict.fromkeys(str(run.facts["commit"]) for run in runs)
    rows = {
        "machine": f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_mib'] / 1024:.1f} GiB; {facts['system']}",
        "this project": f"{facts['kafka-event-source']}, commit {', '.join(commits)}",
        "Python": facts["python"],
        "confluent-kafka, librdkafka": f"{facts['confluent_kafka']}, {facts['librdkafka']}",
        "msgspec": facts["msgspec"],
        "Apache Kafka, its Java": f"{facts.get('kafka', '-')}, {facts.get('java', '-')}",
        "seed": facts["seed"],
    }
    for name, value in _merged("peers", runs).items():
        rows[f"`{name}`"] = ", ".join(f"{what} {version}" for what, version in dict(value).items())
    for name, why in _merged("not measured", runs).items():
        rows[f"not measured: `{name}`"] = why
    lines = [f"| {name} | {_plain(str(value))} |" for name, value in rows.items()]
    return "\n".join(["## Machine and versions", "", "| | |", "|---|---|", *lines, ""])


def _merged(fact: str, runs: Sequence[Run]) -> dict[str, Any]:
    return {name: value for run in runs for name, value in run.facts.get(fact, {}).items()}


def _plain(text: str) -> str:
    first, *more = text.strip().splitlines() or [""]
    return first.replace("|", "\\|").replace("<", "&lt;") + (" …" if more else "")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value


def _encode(run: Run) -> bytes:
    """A line for each result."""
    lines = ['{"facts":' + msgspec.json.encode(run.facts).decode() + ',"measured":{']
    for number, (name, entries) in enumerate(run.measured.items()):
        end = "]" if number == len(run.measured) - 1 else "],"
        lines.append(f'"{name}":[')
        lines.append(",\n".join(msgspec.json.encode(entry).decode() for entry in entries))
        lines.append(end)
    return "\n".join([*lines, "}}"]).encode()
