"""``kes doctor``: what is wrong with a cluster and an event source, and what to type."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import typer
from rich.text import Text

from streams.cli.checks import findings
from streams.cli.cluster import Json, Servers, named_source
from streams.cli.console import answers, emit
from streams.cli.findings import OK, PROBLEM, UNKNOWN, WARNING, Finding, Target
from streams.looks.addresses import brokers

app = typer.Typer()

_STYLES: Final = {OK: "green", WARNING: "yellow", PROBLEM: "bold red", UNKNOWN: "yellow"}


@app.command()
def doctor(
    source: Annotated[str, typer.Argument(metavar="MODULE:SOURCE", help="An event source to check, too.")] = "",
    bootstrap_servers: Servers = "",
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.1, max=86_400, help="Seconds to wait for each answer.")
    ] = 10.0,
    json: Json = False,
) -> None:
    """Diagnose libraries, brokers and clocks; for a source also settings, rights, topics, group, transactions and keys.
    Each problem comes with the command that fixes it. Changes nothing; the source may be running.

    Exit codes: 0 no problem; 1 at least one problem; 2 wrong usage.
    """
    named = named_source(source) if source else None
    target = Target(source, named, brokers(bootstrap_servers, named.config if named else None), timeout)
    found: list[Finding] = []
    for finding in findings(target):
        found.append(finding)
        if not json:
            answers().print(_line(finding), soft_wrap=True)
    count, warnings = (sum(finding.state == state for finding in found) for state in (PROBLEM, WARNING))
    data = {
        "bootstrap_servers": target.servers,
        "problems": count,
        "warnings": warnings,
        "findings": [*map(msgspec.structs.asdict, found)],
    }
    # A source that stands still is a warning: it may have been stopped on purpose. So the end tells of warnings, too.
    emit(data, json, lambda: Text(f"{_counted(count, 'problem')}, {_counted(warnings, 'warning')}"))
    if count:
        raise typer.Exit(1)


def _line(finding: Finding) -> Text:
    line = Text(f"{finding.state:<8}", style=_STYLES[finding.state]) + Text(f"{finding.check:<13}{finding.text}")
    return line + Text(f"\n{'':<21}{finding.remedy}") if finding.remedy else line


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
