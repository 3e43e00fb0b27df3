"""Dead letters on the pages: look, and send again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

import msgspec

from streams.cli.cluster import await_listener
from streams.cli.letter_choice import LetterChoice, collect, explained, originals_of, problems_of, record_of
from streams.cli.letter_tables import whole
from streams.cli.letters import LetterBox, resent
from streams.cli.records import Decoder, one_line, place_of, shortened
from streams.clients.settings import ClientSettings
from streams.config import EventSourceConfig
from streams.errors import ConfigError, OffsetError, Stopped, StreamsError, TopicError, TransactionFailed
from streams.event_source import EventSource
from streams.sak.harmless import harmless
from streams.web.actions import ActionRun
from streams.web.group_look import GroupLook

MOST_LETTERS: Final = 50
"""Letters on the page, the oldest ones."""
LOOK_SECONDS: Final = 4.0
"""The time for reading them: a topic with more than that is for ``kes dlq``."""
_REPLAY_SECONDS: Final = 30.0
_LONGEST: Final = 4_000


class ReplayLetters(msgspec.Struct, frozen=True):
    """Letters to be sent again, by ``PARTITION@OFFSET`` in their topic."""

    places: list[str]


class DeadLetters:
    """The dead letters of one source."""

    def __init__(self, source: EventSource[Any], look: GroupLook) -> None:
        self._source, self._look = source, look
        self.topic = source.config.dead_letters
        self._looking = asyncio.Lock()

    async def look(self) -> dict[str, Any]:
        """Return the oldest open letters with their events, for people: texts are cut, and harmless."""
        over = threading.Event()
        async with self._looking:  # one reader at a time
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    return await asyncio.to_thread(self._read, over.is_set)
            except TimeoutError:
                over.set()
                return self._nothing(f"they were not read within {LOOK_SECONDS:g} s: use kes dlq list")
            except StreamsError as error:
                return self._nothing(str(error))

    async def replay(self, letters: ReplayLetters, run: ActionRun) -> str:
        """Send dead letters to where they came from, each once, all or none. A cancel comes too late for it."""
        sending = asyncio.ensure_future(asyncio.to_thread(self._replay, letters.places, run.progress))
        while True:
            try:
                return await asyncio.shield(sending)
            except asyncio.CancelledError:
                if sending.cancelled():  # by the end of the loop
                    raise

    def _nothing(self, problem: str) -> dict[str, Any]:
        return {"topic": self.topic, "open": None, "letters": [], "problem": problem}

    def _read(self, cancelled: Callable[[], bool]) -> dict[str, Any]:
        decoder = Decoder(self._source)
        with LetterBox(self._settings(), self.topic, LOOK_SECONDS) as box:
            try:
                found = collect(box, LetterChoice(()), MOST_LETTERS, cancelled=cancelled)
            except Stopped:
                return self._nothing("they were not read in time")
            originals = originals_of(box, found.letters)
        shown = [_short(whole(letter, decoder, originals.get(letter.place))) for letter in found.letters]
        return {"topic": self.topic, "open": found.open, "letters": shown, "problem": ""}

    def _replay(self, places: list[str], progress: Callable[[int, int, str], None]) -> str:
        wanted = {place for text in places if (place := place_of(text)) is not None}
        if not wanted or len(wanted) != len(set(places)):
            raise ConfigError("name letters by PARTITION@OFFSET, as in 2@1473")
        config: EventSourceConfig = self._source.config
        if config.source_is_elsewhere:
            raise ConfigError("the source topic is on another cluster than the dead letters: see kes dlq replay")
        decoder = Decoder(self._source)
        progress(0, len(wanted), "reading")
        with (
            LetterBox(self._settings(), self.topic, _REPLAY_SECONDS) as box,
            closing(box.settler()) as settler,  # from here on no other process settles letters, so look now
        ):
            look = collect(box, LetterChoice(wanted), len(wanted), settled=True)
            missing = sorted(wanted - {letter.place for letter in look.letters})
            if missing:
                raise OffsetError(f"{self.topic} has no dead letter at {missing[0]}")
            letters = [letter for letter in look.letters if not letter.is_settled]
            originals = originals_of(box, letters)
            problems = problems_of(box, letters, originals, decoder)
            if problems:
                raise TopicError(f"nothing is sent, since {len(problems)} cannot be: {harmless(problems[0])}")
            pairs = [(letter, resent(letter, record_of(originals.get(letter.place)))) for letter in letters]
            try:
                done = settler.settle(pairs, look.ranges)
            except TransactionFailed as error:
                raise explained(error, self.topic) from error
        progress(done, len(wanted), "")
        return f"sent again: {done}; settled before: {len(wanted) - done}"

    def _settings(self) -> ClientSettings:
        servers = self._look.servers
        await_listener(servers, 0.0)
        return ClientSettings(servers, self._look.client_settings, client_id="kes-web")


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
