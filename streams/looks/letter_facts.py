"""Dead letters as data: in a row, and whole."""

from __future__ import annotations

from typing import Any

from streams.looks.letters import Letter, number_in
from streams.looks.records import Decoder, facts_of, plain_text
from streams.records import IncomingRecord
from streams.runtime.partition.dead_letters import PREFIX
from streams.sak.harmless import harmless


def summary_of(letter: Letter) -> dict[str, Any]:
    """Return a letter as one row of data."""
    facts = letter.facts
    return {
        "place": str(letter.position),
        "state": "settled" if letter.is_settled else "open",
        "origin": letter.origin,
        "key": plain_text(letter.record.key),
        "type": harmless(letter.type),
        "error": facts.get("error", ""),
        "message": facts.get("message", ""),
        "attempts": number_in(facts.get("attempts", "")),
        "handler": facts.get("handler", ""),
        "instance": facts.get("instance", ""),
        "failed_at_ms": number_in(facts.get("failed_at_ms", "")),
    }


def whole(letter: Letter, decoder: Decoder, original: IncomingRecord | str | None) -> dict[str, Any]:
    """Return a letter with its event, as ``decoder`` reads it now, and everything that it says of its failure.
    ``original``: the record, of a letter that goes by reference, or why it is not to be had."""
    record = original if isinstance(original, IncomingRecord) else letter.as_received
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
