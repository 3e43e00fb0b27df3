"""The end of the demo in words: verdicts, the final table, the JSON summary."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import msgspec
import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.flights.events import BoardPublished
from examples.flights.fleet import Killed
from examples.flights.verify import Check

AIRPORTS_SHOWN = 10


class Report(msgspec.Struct, kw_only=True):
    """Everything there is to say at the end."""

    flights: int
    events: int
    seconds: float
    spark_seconds: float
    fold_seconds: float
    transactions: int
    killed: Killed | None
    restarts: int
    checks: list[Check]
    boards: dict[str, BoardPublished]
    airlines: dict[str, str]
    plot: str

    @property
    def right(self) -> bool:
        """Whether every check found nothing wrong."""
        return all(check.wrong == 0 for check in self.checks)


def verdict(check: Check) -> str:
    """One check in one line."""
    result = "all right" if check.wrong == 0 else f"{check.wrong:,} WRONG"
    return f"{check.name}: {check.compared:,} compared, {result}"


def show(report: Report, *, json: bool, console: Console) -> None:
    """The table and the verdicts on stdout (or the summary as JSON); differences on stderr."""
    show_differences(report.checks, console)
    if json:
        sys.stdout.write(orjson.dumps(summary(report), msgspec.to_builtins, orjson.OPT_APPEND_NEWLINE).decode())
        sys.stdout.flush()
        return
    answers = Console(highlight=False)
    answers.print()
    answers.print(
        board_table("Airlines: turnarounds, delays recovered on the way", "airline:", report.boards, report.airlines)
    )
    answers.print()
    answers.print(board_table(f"Airports (the {AIRPORTS_SHOWN} with most turnarounds)", "airport:", report.boards, {}))
    answers.print()
    for check in report.checks:
        mark = ("ok   ", "green") if check.wrong == 0 else ("WRONG", "bold red")
        answers.print(Text.assemble(mark, " ", verdict(check)), soft_wrap=True)
    answers.print(Text(closing(report)), soft_wrap=True)
    answers.print(Text(f"delays by hour and airline: {report.plot}"), soft_wrap=True)


def show_differences(checks: Iterable[Check], console: Console) -> None:
    """The first differences of each check, and how many more there are."""
    for check in checks:
        for difference in check.differences:
            console.print(Text(f"{check.name}: {difference}", style="red"), soft_wrap=True)
        if check.wrong > len(check.differences):
            console.print(Text(f"{check.name}: and {check.wrong - len(check.differences):,} more", style="red"))


def closing(report: Report) -> str:
    """What happened, in a sentence or two."""
    words = (
        f"{report.flights:,} flights, {report.events:,} events, {report.transactions:,} transactions, "
        f"{report.seconds:.0f} s in all (Spark wrote for {report.spark_seconds:.0f} s, the event sources worked for "
        f"{report.fold_seconds:.0f} s, {report.events / max(report.fold_seconds, 0.001):,.0f} events/s)."
    )
    if report.killed is None:
        return words + " Nobody was killed."
    back = report.killed.back_seconds
    again = f"was committing again {back:.1f} s later" if back is not None else "came back when the work was done"
    return words + f" {report.killed.worker} was killed after {report.killed.at_events:,} events and {again}."


def summary(report: Report) -> dict[str, object]:
    """For programs: the report without its tables."""
    return {
        "right": report.right,
        "flights": report.flights,
        "events": report.events,
        "seconds": round(report.seconds, 1),
        "spark_seconds": round(report.spark_seconds, 1),
        "fold_seconds": round(report.fold_seconds, 1),
        "transactions": report.transactions,
        "killed": report.killed,
        "restarts": report.restarts,
        "checks": report.checks,
        "plot": report.plot,
    }


def board_table(title: str, prefix: str, boards: Mapping[str, BoardPublished], names: Mapping[str, str]) -> Table:
    """The lines of one kind of board, busiest first."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for column in ("turnarounds", "mean", "fastest", "recovered", "min each"):
        table.add_column(column, justify="right", no_wrap=True)
    lines = sorted((line for line in boards.values() if line.board.startswith(prefix)), key=lambda x: -x.turnarounds)
    for line in lines if names else lines[:AIRPORTS_SHOWN]:
        code = line.board.removeprefix(prefix)
        table.add_row(
            names.get(code, code),
            f"{line.turnarounds:,}",
            clock(line.turnaround_minutes / line.turnarounds) if line.turnarounds else "",
            clock(line.fastest_turnaround) if line.fastest_turnaround is not None else "",
            f"{line.recovered:,}",
            f"{line.recovered_minutes / line.recovered:.0f}" if line.recovered else "",
        )
    return table


def clock(minutes: float) -> str:
    """``7:05`` for seven hours and five minutes."""
    whole = round(minutes)
    return f"{whole // 60}:{whole % 60:02d}"
