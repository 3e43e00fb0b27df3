"""Dead letters as data, as a table, and whole."""

from __future__ import annotations

from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from streams.looks.letters import Letter, number_in
from streams.looks.records import Decoder, facts_of, one_line, plain_text, shortened, shown_time
from streams.records import IncomingRecord
from streams.runtime.partition.dead_letters import PREFIX
from streams.sak.harmless import harmless

_WIDEST: Final = 60
_MOST_ROWS: Final = 1_000


def summary_of(letter: Letter) -> dict[str, Any]:
    """Return a letter as one row of data."""
    facts = letter.facts
    return {
        "place": str(letter.place),
        "state": "settled" if letter.is_settled else "open",
        "origin": letter.origin,
        "key": plain_text(letter.record.key),
        "type": harmless(letter.record.record_type or ""),
        "error": facts.get("error", ""),
        "message": facts.get("message", ""),
        "attempts": number_in(facts.get("attempts", "")),
        "handler": facts.get("handler", ""),
        "instance": facts.get("instance", ""),
        "failed_at_ms": number_in(facts.get("failed_at_ms", "")),
    }


def table_of(letters: list[Letter]) -> Table:
    """Return letters as a table for people."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
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


def whole(letter: Letter, decoder: Decoder, original: IncomingRecord | str | None) -> dict[str, Any]:
    """Return a letter with its event, as ``decoder`` reads it now, and everything that it says of its failure.
    ``original``: the record, of a letter that goes by reference, or why it is not to be had."""
    record = original if isinstance(original, IncomingRecord) else letter.record
    content = decoder.content(record)
    problem = original if isinstance(original, str) else content.problem
    headers = facts_of(record, content)["headers"]
    return {
        **summary_of(letter),
        "value": content.value,
        "problem": problem,
        "headers": [[name, value] for name, value in headers if not name.startswith(PREFIX)],
        "left_out": letter.left_out,
        "facts": dict(letter.facts),
    }


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
