"""Dead letters that are chosen: found, checked, and refused together."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from streams.errors import OffsetError, StreamsError, TransactionFailed
from streams.looks.letters import Letter, LetterBox, Settled
from streams.looks.records import Decoder, PartitionOffset
from streams.records import IncomingRecord
from streams.runtime.partition.dead_letters import ROW, WINDOW


class LetterChoice(NamedTuple):
    """The letters that are wanted; of no places: all of them. ``key``: text."""

    positions: Collection[PartitionOffset]
    partition: int | None = None
    key: str | None = None
    type: str | None = None

    def takes(self, letter: Letter) -> bool:
        """Check whether a letter is one of them."""
        record = letter.record
        return (
            (not self.positions or letter.position in self.positions)
            and (self.partition is None or record.partition == self.partition)
            and (self.key is None or record.key == os.fsencode(self.key))
            and (self.type is None or letter.type == self.type)
        )


class ChosenLetters(NamedTuple):
    """The letters that are chosen, up to the limit; how many are ``open`` and ``settled`` in all; what is settled."""

    letters: list[Letter]
    open: int
    settled: int
    ranges: dict[int, Settled]


def collect(
    box: LetterBox,
    wanted: LetterChoice,
    limit: int,
    *,
    settled: bool = False,
    after: PartitionOffset | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> ChosenLetters:
    """Look for letters, the first ones of each partition; ``settled``: also for those that are. ``after``: the first
    ones behind this position, in the order of positions, as a page has them. ``cancelled``: see ``LetterBox.scan``."""
    found: list[Letter] = []
    counts = [0, 0]
    kept: Counter[int] = Counter()  # of each partition, where the order of positions counts; or of all together

    def receive(letter: Letter) -> None:
        if wanted.takes(letter):
            counts[letter.is_settled] += 1
            number = 0 if after is None else letter.record.partition
            is_behind = after is None or letter.position > after
            if kept[number] < limit and is_behind and (settled or not letter.is_settled):
                kept[number] += 1
                found.append(letter)

    ranges = box.scan(receive, whole=settled, cancelled=cancelled)
    first = sorted(found, key=lambda letter: letter.position)[:limit]
    return ChosenLetters(first, counts[False], counts[True], ranges)


def explained(error: TransactionFailed, topic: str) -> StreamsError:
    """Return a failed transaction as an error that says what to do."""
    if error.kind == "fenced":
        return OffsetError(
            f"another `kes dlq` of {topic} began meanwhile, and this one was ended: nothing is sent twice. Run it "
            "again to see what is left"
        )
    if error.kind == "unknown":
        return OffsetError(f"{error}. The last transaction is in doubt: run it again, nothing is sent twice")
    return error


def originals_of(box: LetterBox, letters: Iterable[Letter]) -> dict[PartitionOffset, IncomingRecord | str]:
    """Return the records of letters that go by reference, or why they are not to be had."""
    return box.originals(letter for letter in letters if letter.left_out)


def record_of(original: IncomingRecord | str | None) -> IncomingRecord | None:
    """Return the record, if there is one."""
    return original if isinstance(original, IncomingRecord) else None


def problems_of(
    box: LetterBox,
    letters: list[Letter],
    originals: dict[PartitionOffset, IncomingRecord | str],
    decoder: Decoder | None,
) -> list[str]:
    """Say of each letter that cannot be sent why."""
    topics = sorted({letter.facts["topic"] for letter in letters if letter.is_addressed})
    counts = {topic: box.partitions(topic) for topic in topics}
    found = []
    for letter in letters:
        original = originals.get(letter.position)
        count = counts.get(letter.facts.get("topic", "")) if letter.is_addressed else 0
        problem = ""
        if not letter.is_addressed:
            problem = "it does not say where it came from"
        elif letter.facts.get("kind") == ROW:
            topic = letter.facts["topic"]
            problem = (
                f"it is a row of the joined table {topic}, where it would take the place of a newer one. If it is "
                f"still right, write it to {topic} as its owner does; then `kes dlq drop` the letter"
            )
        elif letter.facts.get("kind") == WINDOW:
            problem = (
                f"it is the window {letter.facts.get('window')} of {letter.origin}, and no event: report its value as "
                "`on_close` would have; then `kes dlq drop` the letter"
            )
        elif "job_id" in letter.facts:
            # Sent again it would be another call, under another id: only a handler can say that it is wanted.
            problem = (
                f"it is the end of a durable job ({letter.facts.get('jobs')}, {letter.facts['job_id']}), and no event: "
                "send an event whose handler starts the job again, with this value as its item; then `kes dlq drop` "
                "the letter"
            )
        elif count is None:
            problem = f"topic {letter.facts['topic']} does not exist any more: create it, or drop the letter"
        elif int(letter.facts["partition"]) >= count:
            problem = f"topic {letter.facts['topic']} has {count} partitions only"
        elif isinstance(original, str):
            problem = original
        elif decoder is not None and "timer" in letter.facts and decoder.has_rule(letter.facts["topic"]):
            problem = "it is the event of a timer, and in its topic a rule says what records are: set the timer again"
        elif decoder is not None:
            problem = decoder.content(record_of(original) or letter.as_received).problem
        if problem:
            found.append(f"{letter.position}: {problem}")
    return found
