"""Questions of this process to the members of a running group: each goes to the member that owns its partition."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar

import aiohttp
import msgspec

from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    NotCaughtUp,
    NotOwned,
    Stopped,
    StoreError,
    StreamsError,
)
from streams.queries.finding import MemberFinder
from streams.queries.hedging import hedged
from streams.queries.routing import Server, is_likely
from streams.queries.tickets import (
    SEAL_HEADER,
    TICKET_HEADER,
    TicketRefused,
    check_seal,
    group_secret,
    ticket,
)
from streams.runtime.queries.commands import CommandQuestion
from streams.runtime.queries.operating import OperatorRequest
from streams.runtime.queries.questions import BUSY_SECONDS, MOST_BYTES_IN, MOST_BYTES_READ, Question, Refusal
from streams.sak.forks import MadeHere
from streams.settings.config import EventSourceConfig

Q = TypeVar("Q", bound=Question | OperatorRequest[Any] | CommandQuestion)
R = TypeVar("R")

_REQUEST_SECONDS: Final = 6.0
_ANSWER_SECONDS: Final = 0.5
"""Of the time of a request, what is left to the member to say that it cannot answer."""
_PAUSE_SECONDS: Final = 0.05


class _Busy(NotOwned):
    """A member has no room for a question, and wants it again."""


class GroupAsker(Generic[Q, R]):
    """A way to ask the members of a group, between ``async with`` and its end. On one loop. Raises ``ConfigError``
    without the group's secret (``QueryConfig.secret_file``)."""

    _reply: type[R]

    def __init__(self, config: EventSourceConfig) -> None:
        self.config = config.resolved()
        self._secret = group_secret(config.queries.secret_file)
        self._session: aiohttp.ClientSession | None = None
        self._finder: MemberFinder

    async def __aenter__(self) -> Self:
        """Connect. The group is looked at by the first question."""
        self._made_here = MadeHere(f"this {type(self).__name__}", ConfigError)
        self._finder = MemberFinder(self.config)
        ca = self.config.queries.tls_ca_file
        context = ssl.create_default_context(cafile=ca or None)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=64),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,  # no member compresses, and a forged address could send what grows without end
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        await self._finder.close()

    async def _ask(self, question: Q, timeout_seconds: float) -> tuple[R, float]:
        """Put the question to members until one answers."""
        if self._session is None:
            raise Stopped(f"this {type(self).__name__} is not open: enter it, by async with")
        self._made_here.check()
        if not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds is {timeout_seconds}; it must be more than 0")
        deadline = time.monotonic() + timeout_seconds
        nobody = f"no member of {self.config.group_id} has an address for queries (kes run --queries)"
        reason: StreamsError = NotOwned(nobody)
        copies, is_first = question.max_staleness is not None, True
        while (left := deadline - time.monotonic()) > 0:
            try:  # the owner alone can answer a read that no copy may: it comes first once, also if it was silent
                asked = await self._finder.candidates(
                    question.partition, left, copies=copies, silent_last=copies or not is_first
                )
            except BrokerUnavailable:
                if is_first:
                    raise
                break  # a member has said more than that
            if is_first:  # the description may be too old: look once more before others are bothered
                asked = [each for each in asked if copies and is_likely(each, question.partition)] or asked[:1]
            answered = await (self._hedged if copies else self._in_turn)(asked, question, deadline)
            if isinstance(answered, tuple):
                return answered
            reason, is_first = answered or reason, False
            self._finder.forget()
            await asyncio.sleep(min(_PAUSE_SECONDS, max(0.0, deadline - time.monotonic())))
        where = f"{self.config.topic}[{question.partition}]"
        raise type(reason)(f"{where}: no answer within {timeout_seconds:g} s; the last reason: {reason}")

    async def _in_turn(
        self, servers: list[Server], question: Q, deadline: float
    ) -> tuple[R, float] | StreamsError | None:
        """Ask one member after the other. Returns the answer, or the last reason why there is none."""
        reason: StreamsError | None = None
        for server in servers:
            answered = await self._put_until(server, question, deadline)
            if isinstance(answered, tuple):
                return answered
            reason = answered or reason
        return reason

    async def _hedged(
        self, servers: list[Server], question: Q, deadline: float
    ) -> tuple[R, float] | StreamsError | None:
        """Ask the owner, and members with a copy as well while it is silent. Returns as ``_in_turn``."""

        async def look() -> list[Server]:
            left = deadline - time.monotonic()
            try:
                await self._finder.refresh(left)
                found = await self._finder.candidates(question.partition, left, copies=True, silent_last=True)
            except BrokerUnavailable:  # the members may answer all the same
                return []
            return [each for each in found if is_likely(each, question.partition)]

        put = partial(self._put_until, question=question, deadline=deadline)
        return await hedged(question.partition, servers, put, look, self._finder.note_silence)

    async def _put_until(self, server: Server, question: Q, deadline: float) -> tuple[R, float] | StreamsError | None:
        """Put the question to one member, again while it is busy. Returns its answer, or the reason why there is none;
        ``None``: there was no time."""
        reason: StreamsError | None = None
        while (left := deadline - time.monotonic()) > 0:
            try:
                put_at = time.time()
                return await self._put(server, question, left), put_at
            except _Busy as error:
                reason = NotOwned(str(error))
                await asyncio.sleep(min(max(_PAUSE_SECONDS, BUSY_SECONDS), max(0.0, deadline - time.monotonic())))
            except (NotOwned, NotCaughtUp, TicketRefused) as error:  # of a forged note, perhaps
                return error
        return reason

    async def _put(self, server: Server, question: Q, left: float) -> R:
        """Put the question to one member. Raises ``NotOwned`` also for one that does not answer."""
        assert self._session is not None
        most = min(left, _REQUEST_SECONDS)
        patience = most - min(_ANSWER_SECONDS, most / 4)
        body = msgspec.json.encode(msgspec.structs.replace(question, timeout_seconds=patience))
        if len(body) > MOST_BYTES_IN:
            raise ConfigError(f"the question has {len(body)} bytes, its keys included; members take {MOST_BYTES_IN}")
        asked = ticket(self._secret, "POST", question.path, body, server.address, time.time())
        timeout = aiohttp.ClientTimeout(total=most, ceil_threshold=2 * most)  # a longer one is rounded up
        try:
            async with self._session.post(
                server.address + question.path,
                data=body,
                headers={TICKET_HEADER: asked, "content-type": "application/json"},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                content = await response.content.read(MOST_BYTES_READ)
                while not response.content.at_eof() and len(content) < MOST_BYTES_READ:
                    content += await response.content.read(MOST_BYTES_READ - len(content))
                status, sealed = response.status, response.headers.get(SEAL_HEADER, "")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._finder.note_silence(server)
            raise NotOwned(f"{server.instance} at {server.address} does not answer: {error!r}") from None
        if status == 401 and not sealed:
            raise TicketRefused(
                f"{server.instance} at {server.address} does not accept the ticket: secret or clocks differ"
            )
        if not sealed and status in (413, 503, 504):
            raise NotOwned(f"{server.instance} at {server.address} is busy ({status})")
        if not sealed and status == 404:
            raise NotOwned(f"{server.instance} at {server.address} has no {question.path}: its release is older")
        check_seal(self._secret, sealed, asked, status, content)
        self._finder.note_answer(server)
        if status == 200:
            return msgspec.json.decode(content, type=self._reply)
        refusal = msgspec.json.decode(content, type=Refusal)
        kinds = {"Busy": _Busy, "NotCaughtUp": NotCaughtUp, "ConfigError": ConfigError, "StoreError": StoreError}
        kinds |= dict.fromkeys(("NotOwned", "MembershipLost", "Stopped"), NotOwned)
        older = "unknown field" in refusal.message  # of a question, which says more than that release knows
        advice = "; the release of this member is older than the reader's: update members first" * older
        raise kinds.get(refusal.error, StreamsError)(f"{server.instance}: {refusal.message}{advice}")


async def together(asked: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the answers to all. An error ends the others, which would go on without the reader."""
    tasks = [asyncio.create_task(each) for each in asked]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
