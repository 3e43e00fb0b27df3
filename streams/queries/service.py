"""The HTTP service of a member: it answers the questions of readers that have a ticket. Any loop and thread; the store
is read on that of the event source.

``query_app`` is an ASGI application with a route for readers (``POST /api/v1/query``), one for callers of commands
(``/api/v1/command``) and one for each kind of operators' requests (``/api/v1/parked``, ``/api/v1/jobs``), for an
application of your own to mount, or for ``QueryServer``. It never asks another member: a reader that has come to the
wrong one goes to the right one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router

from streams.errors import ConfigError, MembershipLost, NotCaughtUp, NotOwned, Stopped, StoreError, StreamsError
from streams.model.answers import Answer
from streams.queries.tickets import SEAL_HEADER, TICKET_HEADER, TicketRefused, check_ticket, seal
from streams.records import TopicPartition
from streams.runtime.queries.commands import CommandAnswer, CommandQuestion, checked_question
from streams.runtime.queries.commands import answered as answered_command
from streams.runtime.queries.jobs import JobRequest
from streams.runtime.queries.operating import OperatorReply, OperatorRequest, answered
from streams.runtime.queries.parked import ParkedRequest
from streams.runtime.queries.points import Crossing, is_point
from streams.runtime.queries.questions import (
    BUSY_SECONDS,
    LONGEST_SECONDS,
    MOST_BYTES_IN,
    MOST_BYTES_READ,
    NamedOffset,
    Question,
    Refusal,
    Reply,
    TurnRows,
    checked,
    read_of,
)
from streams.source.event_source import EventSource

_log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_AT_A_TIME: Final = 64
MOST_AWAITED: Final = 400
"""Replies to commands that are waited for here. Each has a connection, and readers need some of the
``server.MOST_CONNECTIONS``."""

_STATUS: Final[dict[type[Exception], int]] = {
    TicketRefused: 401,
    NotOwned: 421,
    MembershipLost: 421,
    Stopped: 421,
    NotCaughtUp: 504,
    ConfigError: 400,
    StoreError: 400,
}


class _TooLarge(StreamsError):
    pass


class _Busy(StreamsError):
    pass


Answering = Callable[[bytes], Awaitable[Reply | OperatorReply | CommandAnswer]]


class RequestRoom:
    """RequestRoom for so many requests at a time. On one loop."""

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._busy = 0

    async def counted(self, reply: Callable[[bytes], Awaitable[T]], body: bytes) -> T:
        """Answer, if there is room. Those without a ticket take none of it."""
        if self._busy >= self._most():
            raise _Busy(f"busy: {self._busy} requests are under way")
        self._busy += 1
        try:
            return await reply(body)
        finally:
            self._busy -= 1


class _Service:
    def __init__(self, source: EventSource[Any], secret: bytes, address: Callable[[], str]) -> None:
        self._run, self._secret, self._address = source._run, secret, address
        self._crossing: Crossing | None = None  # to the present run of the source

    def route(self, path: str, reply: Answering, room: RequestRoom) -> Route:
        """Make a route whose requests ``reply`` answers from their bodies, while there is room."""

        async def answer(request: Request) -> Response:
            return await self._answer(request, path, reply, room)

        return Route(path, answer, methods=["POST"])

    async def _answer(self, request: Request, path: str, reply: Answering, room: RequestRoom) -> Response:
        asked = request.headers.get(TICKET_HEADER, "")
        is_known = False  # nothing is sealed for a ticket that was not made with the secret
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                body = await _body(request)
                check_ticket(self._secret, asked, "POST", path, body, self._address(), time.time())
                is_known = True
                content = msgspec.json.encode(await room.counted(reply, body))
                if len(content) >= MOST_BYTES_READ:
                    raise StoreError(f"the answer has {len(content)} bytes; readers take less than {MOST_BYTES_READ}")
            return self._sealed(asked, 200, content)
        except _TooLarge as error:
            return self._sealed("", 413, _refusal(error, "TooLarge"))
        except _Busy as error:
            response = self._sealed(asked, 503, _refusal(error, "Busy"))
            response.headers["retry-after"] = str(BUSY_SECONDS)
            return response
        except (TimeoutError, ClientDisconnect) as error:
            return self._sealed(asked if is_known else "", 504, _refusal(error, "NotCaughtUp"))
        except StreamsError as error:
            status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
            return self._sealed(asked if is_known else "", status, _refusal(error, type(error).__name__))
        except Exception:  # of a store or a codec: its text is for the log, not for the line
            _log.exception("a question of a reader failed")
            failed = StreamsError("the question failed at the member, whose log says why")
            return self._sealed(asked if is_known else "", 500, _refusal(failed, "StreamsError"))

    def _sealed(self, asked: str, status: int, body: bytes) -> Response:
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        if asked:
            headers[SEAL_HEADER] = seal(self._secret, asked, status, body)
        return Response(body, status, headers, media_type="application/json")

    async def reply(self, body: bytes) -> Reply:
        """Answer a question."""
        config, question = self._run.config, _read(body, Question)
        checked(question, config.group_id, config.num_partitions)
        loop = self._loop()
        if is_point(question):
            return await self._point(question, loop)
        return await self._on_its_loop(self._ask(question), loop)

    def reply_to_operator(self, kind: type[OperatorRequest[Any]]) -> Callable[[bytes], Awaitable[OperatorReply]]:
        """Make the answer to operators' requests of a kind."""

        async def reply(body: bytes) -> OperatorReply:
            config, request = self._run.config, _read(body, kind)
            request.checked(config.group_id, config.num_partitions)
            return await self._on_its_loop(self._operate(request), self._loop())

        return reply

    async def reply_to_command(self, body: bytes) -> CommandAnswer:
        """Answer a question for the reply to a command, once that is committed."""
        config, question = self._run.config, _read(body, CommandQuestion)
        checked_question(question, config.group_id, config.num_partitions)
        return await self._on_its_loop(self._await_reply(question), self._loop())

    async def _await_reply(self, question: CommandQuestion) -> CommandAnswer:
        return await answered_command(self._run.queries(), question)

    async def _operate(self, request: OperatorRequest[Any]) -> OperatorReply:
        async with asyncio.timeout(min(request.timeout_seconds, LONGEST_SECONDS)):
            reply: OperatorReply = await answered(self._run.present(), request)
            return reply

    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._run.loop is None:
            raise Stopped("the event source is not running")
        return self._run.loop

    @staticmethod
    async def _on_its_loop(asking: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
        """Run it on the loop of the source."""
        try:
            answering = asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError as error:  # its loop is closed
            asking.close()
            raise Stopped("the event source is not running") from error
        try:
            return await asyncio.wrap_future(answering)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Stopped("the event source has stopped") from None  # it cancelled the answer, not we

    async def _point(self, question: Question, loop: asyncio.AbstractEventLoop) -> Reply:
        crossing = self._crossing
        if crossing is None or crossing.loop is not loop or crossing.home is not asyncio.get_running_loop():
            self._crossing = crossing = Crossing(loop, lambda: self._run.queries().points)
        if question.timeout_seconds >= LONGEST_SECONDS:
            return await crossing.read(question)
        async with asyncio.timeout(question.timeout_seconds):
            return await crossing.read(question)

    async def _ask(self, question: Question) -> Reply:
        """Answer on the loop of the source. A page is of several turns, and no snapshot."""
        engine, local = self._run.present(), self._run.queries()
        at_least = {TopicPartition(topic, partition): offset for topic, partition, offset in question.at_least}
        rows: list[tuple[bytes, bytes]] = []
        places: list[bytes] = []
        due: list[int] = []
        first: Answer[Any] | None = None
        age, read_at = float("-inf"), 0.0
        came_at = engine.environment.elapsed_seconds()
        while True:
            wanted = question
            if rows:
                after = places[-1] if places else rows[-1][0]
                wanted = msgspec.structs.replace(question, after=after, limit=question.limit - len(rows))
            answer = await local.query(
                question.partition,
                partial(read_of, wanted),
                key=question.keyed_by,
                at_least=at_least,
                confirm=question.confirm,
                max_staleness=question.max_staleness,
                timeout_seconds=min(question.timeout_seconds, LONGEST_SECONDS),
            )
            first, before, read_at = first or answer, read_at, engine.environment.elapsed_seconds()
            if question.max_staleness is not None:
                # That of the oldest turn; the turns before by a clock that never jumps: one that is set back makes
                # nothing younger.
                age = max(age + read_at - before, engine.environment.wall_seconds() - answer.as_of)
            common: dict[str, Any] = {
                "partition": question.partition,
                "positions": _named(first),
                # When the question came: readers count from there, so the time since then would count twice.
                "age_seconds": max(0.0, age - (read_at - came_at)),
                "served_by": answer.served_by,
                "parked": answer.parked,
            }
            if not isinstance(answer.value, TurnRows):
                return Reply(**common, **answer.value)
            due += [len(rows) + number for number in answer.value.due]
            rows += answer.value.rows
            places += answer.value.places
            size = sum(len(key) + len(value) for key, value in rows) + sum(map(len, places))
            if not answer.value.more or len(rows) >= question.limit or size > MOST_BYTES_IN:
                more = answer.value.more
                return Reply(**common, rows=tuple(rows), places=tuple(places), more=more, due_rows=frozenset(due))


def query_app(source: EventSource[Any], secret: bytes, address: Callable[[], str]) -> Router:
    """Make the ASGI application that answers readers of this source. ``secret``: the group's (``group_secret``).
    ``address``: returns the address in the member's status note, for which tickets are made."""
    service, room = _Service(source, secret, address), RequestRoom(lambda: MOST_AT_A_TIME)
    # A ticket is for one path: no reader acts by accident.
    operators: list[type[OperatorRequest[Any]]] = [ParkedRequest, JobRequest]
    routes = [
        service.route(Question.path, service.reply, room),
        service.route(CommandQuestion.path, service.reply_to_command, RequestRoom(lambda: MOST_AWAITED)),
        *(service.route(kind.path, service.reply_to_operator(kind), room) for kind in operators),
    ]
    return Router(routes)


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"the question cannot be read: {error}") from None


def _named(answer: Answer[Any]) -> tuple[NamedOffset, ...]:
    return tuple((where.topic, where.partition, offset) for where, offset in answer.positions.items())


async def _body(request: Request) -> bytes:
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > MOST_BYTES_IN:
            raise _TooLarge(f"the question has more than {MOST_BYTES_IN} bytes")
    return bytes(found)


def _refusal(error: BaseException, name: str) -> bytes:
    return msgspec.json.encode(Refusal(error=name, message=str(error) or f"no answer within {LONGEST_SECONDS:g} s"))
