"""Dead letters for people: as a table, and whole."""

from __future__ import annotations

from typing import Any, Final

from rich.table import Table
from rich.text import Text

from streams.cli.console import frameless
from streams.looks.letter_facts import summary_of
from streams.looks.letters import Letter
from streams.looks.records import one_line, shortened, shown_time
from streams.sak.harmless import harmless

_WIDEST: Final = 60
_MOST_ROWS: Final = 1_000


def table_of(letters: list[Letter]) -> Table:
    """Return letters as a table for people."""
    table = frameless()
    for name in ("letter", "failed at", "origin", "key", "type", "error"):
        table.add_column(name, no_wrap=True)
    for letter in letters[:_MOST_ROWS]:
        facts = summary_of(letter)
        failed = "-" if facts["failed_at_ms"] is None else shown_time(facts["failed_at_ms"])
        error = shortened(harmless(f"{facts['error']}: {facts['message']}"), _WIDEST)
        state = " (settled)" if letter.is_settled else ""
        key = shortened(harmless(letter.record.key), 30)
        cells = (f"{facts['place']}{state}", failed, harmless(facts["origin"]), key, facts["type"], error)
        table.add_row(*map(Text, cells))
    return table


def described(facts: dict[str, Any]) -> Text:
    """Return a whole letter as text for people."""
    lines = [f"{facts['place']}  {facts['state']}  from {harmless(facts['origin']) or 'nowhere'}"]
    failed = facts["failed_at_ms"]
    rows = {
        "key": one_line(facts["key"]),
        "type": facts["type"],
        "value": one_line(facts["value"]),
        "cannot be read": harmless(facts["problem"]),
        "headers": ", ".join(f"{harmless(name)}={one_line(value)}" for name, value in facts["headers"]),
        "error": harmless(f"{facts['error']}: {facts['message']}"),
        "attempts": str(facts["attempts"] or ""),
        "handler": harmless(facts["handler"]),
        "instance": harmless(facts["instance"]),
        "failed at": "" if failed is None else shown_time(failed),
        "left out": ", ".join(f"{name} ({size} bytes)" for name, size in facts["left_out"].items()),
    }
    lines += [f"  {name}: {text}" for name, text in rows.items() if text]
    lines += [f"    {harmless(line)}" for line in facts["facts"].get("trace", "").splitlines()]
    return Text("\n".join(lines) + "\n")
