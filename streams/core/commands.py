"""Commands: their work on the state of a key, and the replies that are kept beside their ids. Pure.

``decide`` gets the state and the command, and returns events, or raises ``Rejected``. ``evolve`` makes the next state
of a state and one event. Each gets a state of its own: what a function changes in the state that it was given has no
effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import msgspec

from streams.errors import (
    ConfigError,
    DecodeError,
    EncodeError,
    IdReused,
    RecordError,
    RegistrationError,
    Rejected,
    VersionConflict,
)
from streams.events import event_type_of, to_record
from streams.model.commands import EXPECTED_HEADER, LONGEST_ID, CommandDone, Versioned
from streams.records import ID_HEADER, IncomingRecord, ReceivedHeaders, Record, TopicPartition

S = TypeVar("S")

MOST_EVENTS: Final = 128
"""Events of one command, at most."""
LONGEST_REPLY: Final = 64 * 1024
"""Bytes of the events, or of the data of a rejection, that are kept with a reply; without them, if they are more."""
LONGEST_TEXT: Final = 1_000
"""Characters of the reason of a rejection that are kept."""
LONGEST_KEY: Final = 10 * 1024
"""Characters or bytes of a command's key, at most: it travels with each question for the reply."""
HIGHEST_VERSION: Final = 10**18 - 1

Outcome = Literal["done", "rejected", "conflict"]


class KeptEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event of a reply, as it is in the output."""

    name: str
    version: int
    value: bytes


class CommandReply(msgspec.Struct, frozen=True, array_like=True):
    """The reply to a command, as it is kept beside its id. ``version``: of the state behind it. ``content``: digest of
    the command. ``text``, ``data`` (JSON): of a rejection. ``is_cut``: events or data were too large to be kept."""

    outcome: Outcome
    version: int
    content: bytes
    count: int = 0
    events: tuple[KeptEvent, ...] = ()
    text: str = ""
    data: bytes = b"null"
    is_cut: bool = False


class CommandRequest(NamedTuple):
    """The content of a command's record beside its value. ``expected``: the version that its key must have;
    ``None``: any will do."""

    id: str
    expected: int | None
    content: bytes


class Handled(NamedTuple):
    """The outcome of a command. ``state``: the next one; ``None``: it has not changed."""

    state: Versioned[Any] | None
    events: Sequence[Any]
    reply: CommandReply


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(CommandReply)


def encode_reply(reply: CommandReply) -> bytes:
    """Encode a reply as it is kept."""
    return _encode(reply)


def decode_reply(kept: bytes) -> CommandReply:
    """Decode a reply that was kept. Raises ``DecodeError``."""
    try:
        return _decoder.decode(kept)
    except msgspec.DecodeError as error:
        raise DecodeError(f"the reply that is kept beside an id is none: {error}") from error


def content_of(key: bytes | None, value: bytes | None, headers: ReceivedHeaders | None) -> bytes:
    """Return the digest of what makes a command another one: key, value, type with version, expected version. Other
    headers do not count: a trace differs each time."""
    digest = hashlib.blake2b(digest_size=16)
    named = [content for name, content in headers or () if name in (EXPECTED_HEADER, "__grt__", "__grv__")]
    for part in (key, value, *named):
        digest.update(b"-" if part is None else b"%d:" % len(part))  # none can be moved into the next one
        digest.update(part or b"")
    return digest.digest()


def check_id(given: object) -> str:
    """Check the id of a command. Raises ``RecordError``."""
    if not isinstance(given, str) or not 1 <= len(given) <= LONGEST_ID:
        shown = f"{given[:40]!r}... ({len(given)} characters)" if isinstance(given, str) and given else repr(given)
        raise RecordError(f"the id of a command is {shown}; it is a text of 1 to {LONGEST_ID} characters")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"the id of a command is no valid Unicode: {error.reason}") from None
    return given


def request_of(record: IncomingRecord) -> CommandRequest:
    """Read what a command's record says beside its value. Raises ``RecordError``."""
    found = record.header(ID_HEADER)
    if found is None:
        raise RecordError(f"{record.where}: the command has no id; its record needs the header {ID_HEADER}")
    expected = record.header(EXPECTED_HEADER)
    try:
        id = check_id(found.decode())
        if expected is not None and not (expected.isdigit() and len(expected) <= 18):
            raise RecordError(f"the header {EXPECTED_HEADER} is {expected[:40]!r}; it is a whole number, 0 or more")
    except (UnicodeDecodeError, RecordError) as error:
        raise RecordError(f"{record.where}: {error}") from None
    content = content_of(record.key, record.value, record.as_received.headers)
    return CommandRequest(id, None if expected is None else int(expected), content)


class CommandRules(Generic[S]):
    """The functions of one aggregate: ``decides`` and ``evolves`` by the classes of their commands and events.
    ``initial``: makes the state of a key that has none."""

    def __init__(self, initial: Callable[[], S], state_class: type[S]) -> None:
        self.initial = initial
        self.state_class = state_class
        self.decides: dict[type[Any], Callable[[S, Any], Any]] = {}
        self.evolves: dict[type[Any], Callable[[S, Any], Any]] = {}

    def handle(self, read: Callable[[], Versioned[S] | None], command: Any, request: CommandRequest) -> Handled:
        """Carry out a command. ``read`` returns the state of its key, a new copy each time; ``None``: there is none.
        Raises what ``decide`` and ``evolve`` raise, and ``RecordError`` for what they may not return."""
        before, content = read(), request.content
        version = 0 if before is None else before.version
        if request.expected is not None and request.expected != version:
            return Handled(None, (), CommandReply("conflict", version, content))
        try:
            state = self.initial() if before is None else before.state
            events = self._checked(command, self.decides[type(command)](state, command))
        except Rejected as rejected:
            return Handled(None, (), _rejection(rejected, version, content))
        if not events:
            return Handled(None, (), CommandReply("done", version, content))
        after = self.evolved(read(), events)
        kept = tuple(
            KeptEvent(kind.name, kind.version, kind.encode(event))
            for event, kind in ((event, event_type_of(type(event))) for event in events)
        )
        is_cut = sum(len(event.value) + len(event.name) for event in kept) > LONGEST_REPLY
        reply = CommandReply("done", after.version, content, len(events), () if is_cut else kept, is_cut=is_cut)
        return Handled(after, events, reply)

    def evolved(self, before: Versioned[S] | None, events: Sequence[Any]) -> Versioned[S]:
        """Return the state behind these events. ``before`` is used up. Raises what ``evolve`` raises, and
        ``RecordError`` for an event without ``evolve``, and for a result that is no state."""
        state, version = (self.initial(), 0) if before is None else (before.state, before.version)
        for event in events:
            function = self.evolves.get(type(event))
            if function is None:
                known = ", ".join(each.__name__ for each in self.evolves) or "none"
                raise RecordError(f"{type(event).__name__} has no evolve; there is one for {known}")
            state = function(state, event)
            if not isinstance(state, self.state_class):
                name = getattr(function, "__qualname__", repr(function))
                raise RecordError(
                    f"evolve {name} returned {type(state).__name__}; it returns the next state, a "
                    f"{self.state_class.__name__}"
                )
        return Versioned(version + len(events), state)

    def record(self, topic: str, command: object, key: object, id: object, expected: object) -> Record:
        """Make the record of a command. Raises ``RegistrationError`` for a class without ``decide``, ``ConfigError``
        for the rest that cannot be, ``EncodeError``."""
        if type(command) not in self.decides:
            known = ", ".join(each.__name__ for each in self.decides) or "none"
            raise RegistrationError(f"{type(command).__name__} has no decide; there is one for {known}")
        if not isinstance(key, str | bytes):
            raise ConfigError(f"the key of a command is a {type(key).__name__}; it is text or bytes")
        if len(key) > LONGEST_KEY:
            raise ConfigError(f"the key of a command has {len(key)} characters or bytes; {LONGEST_KEY}, at most")
        if expected is not None and (type(expected) is not int or not 0 <= expected <= HIGHEST_VERSION):
            raise ConfigError(f"expected_version is {expected!r}; it is a whole number, 0 or more, or None")
        try:
            headers = [(ID_HEADER, check_id(id).encode())]
        except RecordError as error:
            raise ConfigError(str(error)) from None
        if expected is not None:
            headers.append((EXPECTED_HEADER, b"%d" % expected))
        return to_record(topic, command, key=key, headers=headers)

    def done(
        self, reply: CommandReply, content: bytes, positions: Mapping[TopicPartition, int], served_by: str
    ) -> CommandDone:
        """Return what a reply says about a command with this ``content``; raise ``Rejected``, ``VersionConflict`` or
        ``IdReused``. Raises ``DecodeError`` for events that this program does not know."""
        if reply.content != content:
            raise IdReused("the id was used for another command before; that one stands, and this has no effect")
        if reply.outcome == "rejected":
            raise Rejected(reply.text, msgspec.json.decode(reply.data))
        if reply.outcome == "conflict":
            text = f"the state of the key has version {reply.version}, which is not the expected one"
            raise VersionConflict(text, reply.version)
        types = {name: kind for kind in map(event_type_of, self.evolves) for name in kind.names}
        try:
            events = tuple(types[event.name].decode(event.value, event.version) for event in reply.events)
        except KeyError as error:
            raise DecodeError(f"the reply has an event of the type {error}, which has no evolve here") from None
        return CommandDone(reply.version, reply.count, None if reply.is_cut else events, positions, served_by)

    @staticmethod
    def _checked(command: object, answer: object) -> Sequence[Any]:
        what = f"decide of {type(command).__name__} returned"
        if not isinstance(answer, list | tuple):
            close = getattr(answer, "close", None)
            if callable(close):
                close()  # a coroutine that is never awaited, or a generator
            raise RecordError(f"{what} {type(answer).__name__}; it returns a list of events, an empty one for none")
        if len(answer) > MOST_EVENTS:
            raise RecordError(f"{what} {len(answer)} events; a command has {MOST_EVENTS}, at most")
        return answer


def _rejection(rejected: Rejected, version: int, content: bytes) -> CommandReply:
    try:
        data = msgspec.json.encode(rejected.data)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise EncodeError(f"the data of {type(rejected).__name__} is no JSON: {error}") from rejected
    text, is_cut = str(rejected), len(data) > LONGEST_REPLY
    is_cut = is_cut or len(text) > LONGEST_TEXT
    kept = b"null" if len(data) > LONGEST_REPLY else data
    text = text[:LONGEST_TEXT].encode(errors="replace").decode()
    return CommandReply("rejected", version, content, text=text, data=kept, is_cut=is_cut)
