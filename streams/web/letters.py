"""Dead letters on the pages: look, choose, send again, drop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Annotated, Any, Final

import msgspec

from streams.errors import ConfigError, NotCaughtUp, OffsetError, Stopped, TopicError, TransactionFailed
from streams.kafka.settings import ClientSettings
from streams.looks.addresses import await_listener
from streams.looks.letter_choice import LetterChoice, collect, explained, originals_of, problems_of, record_of
from streams.looks.letter_facts import whole
from streams.looks.letters import Letter, LetterBox, resent
from streams.looks.records import Decoder, PartitionOffset, one_line, partition_offset_of, shortened
from streams.records import Output
from streams.sak.harmless import harmless
from streams.source.event_source import EventSource
from streams.web.actions import ActionRun
from streams.web.group_client import GroupClient
from streams.web.look_up import QuestionRefused

MOST_LETTERS: Final = 50
"""Letters on a page."""
READ_SECONDS: Final = 4.0
"""The time for reading them: a topic with more than that is for ``kes dlq``."""
MOST_SETTLED: Final = 10_000
"""Letters of one run, where all are chosen; as of ``kes dlq``."""
_SETTLE_SECONDS: Final = 30.0
_LONGEST: Final = 4_000

_Prepare = Callable[[LetterBox, list[Letter]], list[tuple[Letter, Output | None]]]


class LetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The letters that a page shows: of a partition, a key (text), an event type, as ``kes dlq`` has them; behind the
    place ``after``."""

    partition: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    key: str | None = None
    type: str | None = None
    after: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> LetterFilter:
        """Read the parameters of a request; empty ones count as missing. Raises ``QuestionRefused``."""
        if unknown := sorted(parameters.keys() - {*cls.__struct_fields__}):  # without it more letters would be chosen
            raise QuestionRefused(f"there is no filter {harmless(unknown[0])[:80]!r}")
        given = {name: parameters[name] for name in cls.__struct_fields__ if parameters.get(name)}
        if given.get("partition", "").lower() == "null":  # which would be read as none
            raise QuestionRefused("the filter cannot be read: partition is a number")
        try:
            found = msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise QuestionRefused(f"the filter cannot be read: {error}") from None
        if found.after and partition_offset_of(found.after) is None:
            raise QuestionRefused("the filter cannot be read: after is PARTITION@OFFSET, as in 2@1473")
        return found


class LetterOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Letters to be settled: by ``PARTITION@OFFSET`` in their topic, or ``all`` that are open, as far as the other
    fields choose. A field that is misspelt is refused: without it more letters would be chosen."""

    places: tuple[str, ...] = ()
    all: bool = False
    partition: int | None = None
    key: str | None = None
    type: str | None = None

    def choice(self) -> LetterChoice:
        """Return the letters that are meant. Raises ``ConfigError``."""
        places = {place for text in self.places if (place := partition_offset_of(text)) is not None}
        if len(places) != len(set(self.places)):
            raise ConfigError("name letters by PARTITION@OFFSET, as in 2@1473")
        if self.all == bool(places):
            raise ConfigError("choose letters, or all of them: one of the two")
        return LetterChoice(places, self.partition, self.key, self.type) if self.all else LetterChoice(places)


class DeadLetters:
    """The dead letters of one source."""

    def __init__(self, source: EventSource[Any], group_client: GroupClient) -> None:
        self._source, self._group_client = source, group_client
        self.topic = source.config.dead_letters
        self._looking = asyncio.Lock()

    async def read(self, wanted: LetterFilter) -> dict[str, Any]:
        """Return the first open letters with their events, for people: texts are cut, and harmless. ``next``: the place
        behind which the next page begins; empty if there is none. Raises ``NotCaughtUp``, and as ``LetterBox``."""
        over = threading.Event()
        async with self._looking:  # one reader at a time
            try:
                async with asyncio.timeout(READ_SECONDS):
                    return await asyncio.to_thread(self._read, wanted, over.is_set)
            except (TimeoutError, Stopped):
                over.set()
                raise NotCaughtUp(f"they were not read within {READ_SECONDS:g} s: use kes dlq list") from None

    def nothing(self, problem: str) -> dict[str, Any]:
        """Return what a page shows instead."""
        return {"topic": self.topic, "open": None, "letters": [], "next": "", "problem": problem}

    async def replay(self, letters: LetterOrder, run: ActionRun) -> str:
        """Send dead letters to where they came from, each once, all or none. A cancel comes too late for it."""
        return await self._unbroken(self._settle, letters, self._resent, "sent again", run.progress)

    async def drop(self, letters: LetterOrder, run: ActionRun) -> str:
        """Mark dead letters as settled without sending them. They stay in the topic until its retention deletes
        them."""
        return await self._unbroken(self._settle, letters, _dropped, "dropped", run.progress)

    @staticmethod
    async def _unbroken(work: Callable[..., str], *arguments: Any) -> str:
        working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
        while True:
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                if working.cancelled():  # by the end of the loop
                    raise

    def _read(self, wanted: LetterFilter, cancelled: Callable[[], bool]) -> dict[str, Any]:
        decoder, choice = Decoder(self._source), LetterChoice((), wanted.partition, wanted.key, wanted.type)
        after = partition_offset_of(wanted.after) or PartitionOffset(-1, -1)
        with LetterBox(self._settings(), self.topic, READ_SECONDS) as box:
            found = collect(box, choice, MOST_LETTERS + 1, after=after, cancelled=cancelled)
            page = found.letters[:MOST_LETTERS]
            originals = originals_of(box, page)
        shown = [_short(whole(letter, decoder, originals.get(letter.position))) for letter in page]
        behind = str(page[-1].position) if len(found.letters) > MOST_LETTERS else ""
        return {"topic": self.topic, "open": found.open, "letters": shown, "next": behind, "problem": ""}

    def _settle(
        self, order: LetterOrder, prepare: _Prepare, deed: str, progress: Callable[[int, int, str], None]
    ) -> str:
        wanted = order.choice()
        progress(0, len(wanted.positions), "reading")
        with (
            LetterBox(self._settings(), self.topic, _SETTLE_SECONDS) as box,
            closing(box.settler()) as settler,  # from here on no other process settles letters, so look now
        ):
            limit = len(wanted.positions) or MOST_SETTLED
            chosen = collect(box, wanted, limit, settled=bool(wanted.positions))
            missing = sorted(set(wanted.positions) - {letter.position for letter in chosen.letters})
            if missing:
                raise OffsetError(f"{self.topic} has no dead letter at {missing[0]}")
            letters = [letter for letter in chosen.letters if not letter.is_settled]
            pairs = prepare(box, letters)
            try:
                done = settler.settle(pairs, chosen.ranges)
            except TransactionFailed as error:
                raise explained(error, self.topic) from error
        progress(done, len(chosen.letters), "")
        rest = f"left: {chosen.open - done}" if order.all else f"settled before: {len(wanted.positions) - done}"
        return f"{deed}: {done}; {rest}"

    def _resent(self, box: LetterBox, letters: list[Letter]) -> list[tuple[Letter, Output | None]]:
        if self._source.config.source_is_elsewhere:
            raise ConfigError("the source topic is on another cluster than the dead letters: see kes dlq replay")
        originals = originals_of(box, letters)
        problems = problems_of(box, letters, originals, Decoder(self._source))
        if problems:
            raise TopicError(f"nothing is sent, since {len(problems)} cannot be: {harmless(problems[0])}")
        return [(letter, resent(letter, record_of(originals.get(letter.position)))) for letter in letters]

    def _settings(self) -> ClientSettings:
        servers = self._group_client.servers
        await_listener(servers, 0.0)
        return ClientSettings(servers, self._group_client.client_settings, client_id="kes-web")


def _dropped(_: LetterBox, letters: list[Letter]) -> list[tuple[Letter, Output | None]]:
    return [(letter, None) for letter in letters]


def _short(facts: dict[str, Any]) -> dict[str, Any]:
    texts = {
        name: facts[name] for name in ("place", "origin", "type", "error", "message", "handler", "instance", "problem")
    }
    return {
        **{name: shortened(harmless(text), _LONGEST) for name, text in texts.items()},
        "key": shortened(one_line(facts["key"]), _LONGEST),
        "value": shortened(one_line(facts["value"]), _LONGEST),
        "trace": [shortened(harmless(line), 500) for line in facts["facts"].get("trace", "").splitlines()[-40:]],
        "attempts": facts["attempts"],
        "failed_at_ms": facts["failed_at_ms"],
    }
