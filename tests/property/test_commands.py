"""Commands, pure: what they do to state and version, and what is kept of them, against a list of events."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.codecs import BytesCodec, codec_for
from streams.core import commands
from streams.core.commands import CommandRequest, CommandRules, content_of, decode_reply, encode_reply, request_of
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
from streams.events import event_type
from streams.model.commands import Versioned
from streams.records import IncomingRecord, TopicPartition
from streams.stores.aggregate import MARK, VersionedCodec


class Account(msgspec.Struct):
    """Mutable, as a user's may be."""

    cents: int = 0
    moves: list[int] = []


@event_type("commands.Moved")
class Moved(msgspec.Struct, frozen=True):
    cents: int
    padding: str = ""


@event_type("commands.Move")
class Move(msgspec.Struct, frozen=True):
    """Moves so many times; below zero it is rejected."""

    cents: int
    times: int = 1
    padding: str = ""


@event_type("commands.Unknown")
class Unknown(msgspec.Struct, frozen=True):
    pass


PLACE = TopicPartition("accounts", 0)
CONTENT = b"c" * 16


def move(account: Account, command: Move) -> list[Moved]:
    if account.cents + command.cents * command.times < 0:
        raise Rejected("not enough money", {"cents": account.cents})
    return [Moved(command.cents, command.padding)] * command.times


def moved(account: Account, event: Moved) -> Account:
    account.cents += event.cents  # in place, as a user's may
    account.moves.append(event.cents)
    return account


def rules(decide: Any = move, evolve: Any = moved) -> CommandRules[Account]:
    made: CommandRules[Account] = CommandRules(Account, Account)
    made.decides[Move] = decide
    made.evolves[Moved] = evolve
    return made


def handled(
    made: CommandRules[Account], before: Versioned[Account] | None, command: Any, expected: int | None = None
) -> Any:
    codec = VersionedCodec(codec_for(Account))
    data = None if before is None else codec.encode(before)
    read = lambda: None if data is None else codec.decode(data)  # noqa: E731
    return made.handle(read, command, CommandRequest("id", expected, CONTENT))


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 4), st.one_of(st.none(), st.integers(0, 12)))))
def test_a_history_of_commands_is_a_list_of_events(history: list[tuple[int, int, int | None]]) -> None:
    """Versions count the events, replies say what happened, and come back from their bytes."""
    made, state = rules(), None
    events: list[int] = []
    for cents, times, expected in history:
        found = handled(made, state, Move(cents, times), expected)
        reply = decode_reply(encode_reply(found.reply))
        assert reply == found.reply
        if expected is not None and expected != len(events):
            assert (reply.outcome, reply.version, found.state) == ("conflict", len(events), None)
            with pytest.raises(VersionConflict) as conflict:
                made.done(reply, CONTENT, {}, "w")
            assert conflict.value.version == len(events)
        elif sum(events) + cents * times < 0:
            assert (reply.outcome, reply.version, found.state) == ("rejected", len(events), None)
            with pytest.raises(Rejected, match="not enough money") as rejected:
                made.done(reply, CONTENT, {}, "w")
            assert rejected.value.data == {"cents": sum(events)}
        else:
            events += [cents] * times
            done = made.done(reply, CONTENT, {PLACE: 3}, "w")
            assert (done.version, done.count) == (len(events), times)
            assert done.events == tuple(Moved(cents) for _ in range(times))
            state = found.state or state
        assert (0 if state is None else state.version) == len(events)
        assert ([] if state is None else state.state.moves) == events


def test_an_id_with_other_content_is_reused() -> None:
    reply = handled(rules(), None, Move(1)).reply
    with pytest.raises(IdReused):
        rules().done(reply, b"another", {}, "w")


def test_what_decide_changes_in_its_state_has_no_effect() -> None:
    def spoil(account: Account, command: Move) -> list[Moved]:
        account.cents, account.moves = 1_000, [1_000]
        return [Moved(1)]

    assert handled(rules(spoil), None, Move(0)).state == Versioned(1, Account(1, [1]))
    before = Versioned(3, Account(5, [5]))
    assert handled(rules(spoil), before, Move(0)).state == Versioned(4, Account(6, [5, 1]))


async def _late() -> list[Moved]:
    return []


def _coroutine(account: Account, command: Move) -> Any:
    return _late()


def _generator(account: Account, command: Move) -> Any:
    return (Moved(1) for _ in range(2))


def _wrong(account: Account, event: Moved) -> Any:
    return None


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (lambda account, command: None, "returned NoneType; it returns a list"),
        (lambda account, command: Moved(1), "returned Moved"),
        (_generator, "returned generator"),
        (_coroutine, "returned coroutine"),
        (lambda account, command: "ab", "returned str"),
        (lambda account, command: [Moved(1)] * 129, "129 events; a command has 128"),
        (lambda account, command: [Moved(1)] * 10_000, "10000 events"),
        (lambda account, command: [Unknown()], "Unknown has no evolve; there is one for Moved"),
        (lambda account, command: [None], "NoneType has no evolve"),
        (lambda account, command: [Moved], "StructMeta has no evolve"),
    ],
)
def test_decide_returns_events_and_nothing_else(decide: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        handled(rules(decide), None, Move(1))


def test_evolve_returns_a_state() -> None:
    with pytest.raises(RecordError, match="evolve _wrong returned NoneType; it returns the next state, a Account"):
        handled(rules(evolve=_wrong), None, Move(1))


def test_the_data_of_a_rejection_is_json() -> None:
    def reject(account: Account, command: Move) -> Any:
        raise Rejected("no", object())

    with pytest.raises(EncodeError, match="the data of Rejected is no JSON"):
        handled(rules(reject), None, Move(1))


@given(st.integers(0, 200_000), st.integers(0, 128))
def test_a_reply_is_bounded(size: int, times: int) -> None:
    """Too large: version and count are kept, and the events are in the output only."""
    found = handled(rules(), None, Move(1, times, "x" * size)).reply
    assert len(encode_reply(found)) <= commands.LONGEST_REPLY + 16 * commands.MOST_EVENTS + 100
    done = rules().done(found, CONTENT, {}, "w")
    assert (done.version, done.count) == (times, times)
    assert done.events is None or len(done.events) == times


@given(st.text(max_size=3_000), st.integers(0, 100_000))
def test_a_rejection_is_bounded(text: str, size: int) -> None:
    def reject(account: Account, command: Move) -> Any:
        raise Rejected(text, "x" * size)

    found = handled(rules(reject), None, Move(1)).reply
    assert len(encode_reply(found)) <= commands.LONGEST_REPLY + 4 * commands.LONGEST_TEXT + 100
    with pytest.raises(Rejected) as rejected:
        rules().done(decode_reply(encode_reply(found)), CONTENT, {}, "w")
    assert rejected.value.data in ("x" * size, None)


# -- records -----------------------------------------------------------------------------------------------------------


def _record(headers: list[tuple[str, bytes | None]], key: bytes | None = b"ada", value: bytes = b"{}") -> Any:
    return IncomingRecord("accounts", 0, 7, key, value, headers)


@given(st.text(min_size=1, max_size=100), st.one_of(st.none(), st.integers(0, commands.HIGHEST_VERSION)))
def test_a_record_says_what_was_asked(id: str, expected: int | None) -> None:
    try:
        id.encode()
    except UnicodeEncodeError:
        with pytest.raises(ConfigError):
            rules().record("accounts", Move(1), "ada", id, expected)
        return
    record = rules().record("accounts", Move(1), "ada", id, expected)
    headers = [*(record.headers or ()), ("traceparent", b"00-1")]
    request = request_of(IncomingRecord("accounts", 0, 7, record.key, record.value, headers))
    assert request == CommandRequest(id, expected, content_of(record.key, record.value, record.headers))


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([], "accounts.0.@7: the command has no id; its record needs the header kes-id"),
        ([("kes-id", None)], "the command has no id"),
        ([("kes-id", b"")], "it is a text of 1 to 100 characters"),
        ([("kes-id", b"x" * 101)], "101 characters"),
        ([("kes-id", b"x" * 10_000)], "10000 characters"),
        ([("kes-id", b"\xff\xff")], "accounts.0.@7: "),
        *(
            ([("kes-id", b"1"), ("kes-expected", wrong)], "the header kes-expected is")
            for wrong in (b"-1", b"", b"one", b"1.5", b"9" * 19, b" 1", "١".encode())
        ),
    ],
)
def test_a_record_without_an_id_or_with_a_wrong_version_is_an_error(headers: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        request_of(_record(headers))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"command": Unknown()}, RegistrationError, "Unknown has no decide; there is one for Move"),
        ({"command": None}, RegistrationError, "NoneType has no decide"),
        ({"key": 5}, ConfigError, "the key of a command is a int"),
        ({"key": "k" * 10_241}, ConfigError, "has 10241 characters"),
        ({"key": None}, ConfigError, "the key of a command is a NoneType"),
        *(
            ({"id": wrong}, ConfigError, "the id of a command is")
            for wrong in ("", None, 0, b"a", ["a"], "x" * 101, "\udc80")
        ),
        *(({"expected": wrong}, ConfigError, "expected_version is") for wrong in (-1, "1", 1.0, True, 10**18)),
        ({"command": Move("x")}, EncodeError, "cents"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused_before_it_is_sent(arguments: Any, error: Any, message: str) -> None:
    given = {"command": Move(1), "key": "ada", "id": "1", "expected": None} | arguments
    with pytest.raises(error, match=message):
        rules().record("accounts", *given.values())


def test_content_is_type_key_value_and_expected_version() -> None:
    headers = [("__grt__", b"Move"), ("kes-expected", b"1")]
    digests = {
        content_of(b"ada", b"{}", headers),
        content_of(b"bob", b"{}", headers),
        content_of(b"ada", b"{ }", headers),
        content_of(b"ada", b"{}", headers[:1]),
        content_of(b"ada", b"{}", headers[1:]),
        content_of(b"ada{", b"}", headers),
        content_of(None, b"{}", headers),
    }
    assert len(digests) == 7
    assert content_of(b"ada", b"{}", [*headers, ("kes-id", b"2")]) in digests


@given(st.binary(max_size=60))
def test_bytes_that_are_no_reply_are_refused(kept: bytes) -> None:
    """Nothing but ``DecodeError`` comes of them."""
    with suppress(DecodeError):
        decode_reply(kept)


def test_an_event_of_a_newer_program_is_no_guess() -> None:
    reply = handled(rules(), None, Move(1)).reply
    old: CommandRules[Account] = CommandRules(Account, Account)
    with pytest.raises(DecodeError, match="Moved"):
        old.done(reply, CONTENT, {}, "w")


# -- states with their versions ----------------------------------------------------------------------------------------


@given(st.integers(0, commands.HIGHEST_VERSION), st.binary())
def test_a_state_keeps_its_version(version: int, state: bytes) -> None:
    codec = VersionedCodec(BytesCodec())
    assert codec.decode(codec.encode(Versioned(version, state))) == Versioned(version, state)


@given(st.binary())
def test_a_state_without_a_version_has_version_0(state: bytes) -> None:
    if not state.startswith(MARK):
        assert VersionedCodec(BytesCodec()).decode(state) == Versioned(0, state)


@pytest.mark.parametrize("cut", range(len(MARK), len(MARK) + 8))
def test_a_version_that_is_cut_is_an_error(cut: int) -> None:
    codec = VersionedCodec(BytesCodec())
    with pytest.raises(DecodeError, match="the version of a state ends at byte"):
        codec.decode(codec.encode(Versioned(1, b"state"))[:cut])


def test_a_bare_state_is_not_put() -> None:
    given: Any = Account()
    with pytest.raises(EncodeError, match="holds Versioned"):
        VersionedCodec(codec_for(Account)).encode(given)
