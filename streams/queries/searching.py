"""One key looked up for a person, who may not know the key of its records: an answer says what it does not prove."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from streams.errors import BrokerUnavailable, ConfigError, NotCaughtUp, NotOwned
from streams.model.answers import Answer
from streams.queries.reader import StateReader
from streams.records import TopicPartition


class Searched(NamedTuple):
    """``answers``: those with a value, or else of all partitions that were searched. ``absence``: what is known of a
    key that none of them has; empty otherwise."""

    answers: list[Answer[Any]]
    absence: str = ""


async def search(
    reader: StateReader[Any, Any],
    key: Any,
    partition: int | None = None,
    *,
    at_least: Mapping[TopicPartition, int] | None = None,
    confirm: bool = False,
    max_staleness: float | None = None,
    timeout_seconds: float,
) -> Searched:
    """Look a key up in the partition that is named, or in that of its records; then in all others, unless it is known
    by what the store is routed. Raises as ``StateReader.get``, for the first partition."""
    deadline = time.monotonic() + timeout_seconds
    proof: dict[str, Any] = {"at_least": at_least, "confirm": confirm, "max_staleness": max_staleness}
    home: list[Answer[Any]] = []
    is_unknown = partition is None and not reader.is_routed
    if not is_unknown or isinstance(key, str | bytes):
        home = [await reader.get(key, **proof, timeout_seconds=timeout_seconds, partition=partition)]
        where = f"not in partition {home[0].partition}"
        if home[0].value is not None:
            return Searched(home)
        if partition is not None:
            return Searched(home, f"{where}; no other partition was searched")
        if reader.is_routed:
            return Searched(home, f"{where}, where records of this key go by the routed_by of its source")
    try:
        left = max(0.001, deadline - time.monotonic())
        answers = await reader.get_everywhere(key, **proof, timeout_seconds=left)
    except (NotOwned, NotCaughtUp, BrokerUnavailable, ConfigError) as error:
        if not home:
            raise
        return Searched(
            home,
            f"not in partition {home[0].partition}, where records with this key go. Another one may have it, but they "
            f"did not all answer: {error}",
        )
    found = [answer for answer in answers if answer.value is not None]
    return Searched(found) if found else Searched(answers, f"in none of the {len(answers)} partitions")
