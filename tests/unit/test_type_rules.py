"""Rules that give records their types: the source's own topic and inputs, letters, parked keys, replays, what looks."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest

from streams import DEAD_LETTER, PARK, SKIP, STOP, EventSource, EventSourceConfig, Record, event_type
from streams.errors import ConfigError, EventFailure, RegistrationError
from streams.formats import ByField, ByFunction, ByHeader, CloudEvents, Deleted, Only, TypeRule
from streams.looks.letters import Letter
from streams.looks.records import Decoder
from streams.records import TYPE_HEADER, VERSION_HEADER, IncomingRecord, TypedRecord
from streams.runtime.partition.dead_letters import dead_letter
from streams.runtime.partition.execution import _stamped
from streams.runtime.replay import PartitionReplay
from streams.stores import Aggregate
from streams.testing import TestDriver


@event_type("shop.Placed")
class OrderIn(msgspec.Struct, frozen=True):
    order: str


@event_type("shop.Paid", version=2)
class MoneyIn(msgspec.Struct, frozen=True):
    order: str
    cents: int = 0


BY_FIELD = ByField("kind", {"placed": OrderIn, "paid": MoneyIn})
PLACED, PAID = b'{"kind":"placed","order":"a"}', b'{"order":"a","cents":3,"kind":"paid"}'


def kind_of(record: IncomingRecord) -> Any:
    return {b"1": OrderIn, b"2": "shop.Placed", b"3": None}.get(record.value or b"", 4)


def source_of(types: TypeRule | None, got: list[Any], **settings: Any) -> EventSource[None]:
    settings = {"decode_policy": DEAD_LETTER, **settings}
    source = EventSource(EventSourceConfig(group_id="shop", topic="orders", num_partitions=1, **settings), types=types)

    @source.on
    def placed(ctx: Any, event: OrderIn) -> None:
        got.append(event)
        if event.order == "bad":
            raise ValueError("bad order")

    @source.on
    def paid(ctx: Any, event: MoneyIn) -> None:
        got.append((event, ctx.input.headers))

    @source.on
    def deleted(ctx: Any, event: Deleted) -> None:
        got.append(event)

    return source


def record(value: bytes | None, *headers: tuple[str, bytes | None], key: bytes | None = b"k") -> IncomingRecord:
    return IncomingRecord("orders", 0, 0, key, value, headers or None)


def type_of(rule: TypeRule, value: bytes | None, *headers: tuple[str, bytes | None]) -> str | None:
    return rule.typed(record(value, *headers)).record_type


MANY = b'{"a":' + b"[" * 1200 + b"]" * 1200 + b"}"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (PLACED, "shop.Placed"),
        (msgspec.msgpack.encode({"kind": "paid"}), "shop.Paid"),
        (msgspec.msgpack.encode({"kind": "paid"} | {f"f{n}": n for n in range(20)}), "shop.Paid"),
        (b'  {"kind": "pl\\u0061ced"}', "shop.Placed"),
        (b'{"kind":"paid","kind":"placed"}', "shop.Placed"),  # the last one counts, as for the class itself
        (b'{"kind":"shop.Placed"}', None),
        (b'{"kind":1}', None),
        (b'{"kind":null}', None),
        (b'{"Kind":"placed"}', None),
        (b'{"inner":{"kind":"placed"}}', None),
        (b'[{"kind":"placed"}]', None),
        (b'"placed"', None),
        (b'{"kind":"\\ud800"}', None),
        (b'{"kind":"placed"', None),
        (b"\x81\xc1", None),
        (b"\xff\xfe", None),
        (MANY, None),
        (b"", None),
        (None, None),
    ],
)
def test_a_field_says_the_type_or_nothing(value: bytes | None, found: str | None) -> None:
    assert type_of(BY_FIELD, value) == found


def test_a_field_in_five_megabytes() -> None:
    assert type_of(BY_FIELD, b'{"text":"' + b"x" * 5_000_000 + b'","kind":"placed"}') == "shop.Placed"


@pytest.mark.parametrize(
    ("headers", "table", "found"),
    [
        ([("et", b"placed")], {"placed": OrderIn}, ("shop.Placed", None)),
        ([("et", b"paid")], {"paid": MoneyIn}, ("shop.Paid", b"2")),
        ([("et", b"shop.Placed")], {"placed": OrderIn}, (None, None)),
        ([("et", b"shop.Paid")], None, ("shop.Paid", None)),
        ([("et", b"shop.Paid"), (VERSION_HEADER, b"7")], None, ("shop.Paid", b"7")),
        ([("et", b"a"), ("et", b"a")], None, ("a", None)),
        ([("et", b"a"), ("et", b"b")], None, (None, None)),
        ([("et", None)], None, (None, None)),
        ([("ET", b"a")], None, (None, None)),
        ([(TYPE_HEADER, b"shop.Placed")], None, (None, None)),  # the rule alone says the type
    ],
)
def test_a_header_says_the_type_or_nothing(headers: Any, table: Any, found: tuple[str | None, bytes | None]) -> None:
    typed = ByHeader("et", table).typed(record(b"{}", *headers))
    assert (typed.record_type, typed.header(VERSION_HEADER)) == found


def test_a_function_says_the_type_or_is_the_record_s_problem() -> None:
    rule = ByFunction(kind_of)
    assert [type_of(rule, value) for value in (b"1", b"2", b"3")] == ["shop.Placed", "shop.Placed", None]
    for function, said in ((kind_of, "returned 4"), (lambda _: 1 / 0, "ZeroDivisionError")):
        refused = ByFunction(function).typed(record(b"9"))
        assert isinstance(refused, TypedRecord)
        assert refused.is_refused
        assert said in refused.reason


def test_records_of_one_type_without_headers_share_the_tuple_whose_handler_is_known() -> None:
    for rule, value in ((Only(OrderIn), b"{}"), (BY_FIELD, PLACED)):
        first, second = rule.received([record(value), record(value)])
        assert first.headers is second.headers, rule


@pytest.mark.parametrize(
    "rule", [Only(MoneyIn, nulls=Deleted), BY_FIELD, ByHeader("et"), ByFunction(kind_of)], ids=repr
)
def test_a_record_keeps_what_it_was(rule: TypeRule) -> None:
    came = IncomingRecord("orders", 3, 9, b"k", b"1", (("x", b"1"), (TYPE_HEADER, b"Old"), (VERSION_HEADER, b"3")), 77)
    again: TypeRule = pickle.loads(pickle.dumps(rule))
    for each in (rule, again):
        typed = each.typed(came)
        assert typed.as_received is came
        assert (typed.where, typed.key, typed.timestamp_ms) == (came.where, came.key, 77)
        assert ("x", b"1") in (typed.headers or ())
        assert typed.record_type != "Old"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Only(int), "int"),
        (lambda: Only(OrderIn, nulls=OrderIn), "nulls of Only"),  # type: ignore[arg-type]
        (lambda: ByField("kind", {}), "the table of ByField"),
        (lambda: ByField("", {"a": OrderIn}), "give the name as a text"),
        (lambda: ByField("kind", {1: OrderIn}), "the table of ByField"),  # type: ignore[dict-item]
        (lambda: ByField("kind", {"a": OrderIn}, missing="skip"), "missing of ByField"),  # type: ignore[arg-type]
        (lambda: ByHeader(None), "give the name as a text"),  # type: ignore[arg-type]
        (lambda: ByFunction("kind"), "takes a function"),  # type: ignore[arg-type]
        (lambda: source_of("Click", []), "types of the event source is 'Click'"),  # type: ignore[arg-type]
        (lambda: source_of(None, []).input("b", types=Only), "types of source.input"),  # type: ignore[arg-type]
        (lambda: source_of(None, []).input("b", types=Only(OrderIn), event=OrderIn), "both event= and types="),
        (lambda: source_of(None, []).input("b", nulls=Deleted), "Deleted: with event="),
        (lambda: source_of(None, []).output("b", form=Only(OrderIn)), "form of source.output"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_rule(make: Any, said: str) -> None:
    with pytest.raises((ConfigError, RegistrationError), match=said):
        make()


def test_a_type_of_the_table_without_handler_is_refused_at_the_start() -> None:
    source = EventSource(EventSourceConfig(group_id="g", topic="orders", num_partitions=1), types=BY_FIELD)
    source.register_event_type(OrderIn, lambda ctx, event: None)
    with pytest.raises(RegistrationError, match=r"'orders' are 'shop\.Paid', which has no handler"):
        TestDriver(source)


def test_the_own_topic_without_headers() -> None:
    got: list[Any] = []
    with TestDriver(source_of(ByField("kind", {"placed": OrderIn, "paid": MoneyIn}, nulls=Deleted), got)) as driver:
        driver.send_record(Record("orders", PLACED, b"k"))
        driver.send_record(Record("orders", PAID, b"k", [("x", b"1")]))
        driver.send_record(Record("orders", None, b"k"))
        driver.send_record(Record("orders", None))
        driver.check()
        assert got[0] == OrderIn("a")
        assert got[1] == (MoneyIn("a", 3), ((TYPE_HEADER, b"shop.Paid"), (VERSION_HEADER, b"2"), ("x", b"1")))
        assert got[2] == Deleted(b"k")
        assert len(driver.dead_letters()) == 1  # without a key nothing is deleted


def test_a_backlog_with_our_headers_is_read_by_the_rule_alone() -> None:
    """Switched on in the middle of a topic: an old header must not make an event of what the rule does not know."""
    got: list[Any] = []
    with TestDriver(source_of(BY_FIELD, got)) as driver:
        driver.send(OrderIn("old"), key="k")
        driver.send_record(Record("orders", PLACED, b"k", [(TYPE_HEADER, b"shop.Paid")]))
        [letter] = driver.dead_letters()
        assert got == [OrderIn("a")]
        assert dict(letter.headers or ())[TYPE_HEADER] == b"shop.Placed"  # as it came


def test_a_letter_has_the_bytes_and_headers_that_came_and_the_type_in_a_header_of_ours() -> None:
    source = source_of(BY_FIELD, [], error_policy=DEAD_LETTER)
    with TestDriver(source) as driver:
        driver.send_record(Record("orders", PLACED, b"k"))
        driver.send_record(Record("orders", b'{"kind":"placed","order":"bad"}', b"k", [("x", b"1")]))
        [record_] = driver.dead_letters()
        letter = Letter(record_, 0, False)
        assert (record_.value, letter.own_headers) == (b'{"kind":"placed","order":"bad"}', [("x", b"1")])
        assert letter.type == "shop.Placed"
        assert letter.as_received.where == "orders[0]@1"  # and not its own place
        read = Decoder(source).content(letter.as_received)
        assert (read.type, read.value, read.problem) == ("shop.Placed", {"order": "bad"}, "")


def test_the_letter_of_a_timer_has_our_headers_and_no_rule_reads_it() -> None:
    source, rule = EventSource(EventSourceConfig(group_id="g", topic="orders", num_partitions=1)), Only(OrderIn)
    source = EventSource(source.config, types=rule)

    @source.on
    def placed(ctx: Any, event: OrderIn) -> None:
        ctx.schedule_in(1, MoneyIn("late"))

    @source.on(on_error=DEAD_LETTER)
    def paid(ctx: Any, event: MoneyIn) -> None:
        raise ValueError

    with TestDriver(source) as driver:
        driver.send_record(Record("orders", b'{"order":"a"}', b"k"))
        driver.advance(2)
        letter = Letter(driver.dead_letters()[0], 0, False)
        assert Decoder(source).content(letter.as_received).type == "shop.Paid"


@pytest.mark.parametrize(
    ("rule", "value", "lettered"),
    [
        (ByField("kind", {"placed": OrderIn}, missing=SKIP), b"{}", 0),
        (ByField("kind", {"placed": OrderIn}, nulls=SKIP), b"{}", 1),
        (ByField("kind", {"placed": OrderIn}, nulls=SKIP), None, 0),
        (ByField("kind", {"placed": OrderIn}, missing=SKIP), None, 1),  # a tombstone is none of these
        (ByFunction(lambda _: 1 / 0, missing=SKIP), b"{}", 1),  # type: ignore[arg-type,return-value]
        (Only(OrderIn, nulls=SKIP), b"{}", 1),
    ],
)
def test_policies_of_a_rule(rule: TypeRule, value: bytes | None, lettered: int) -> None:
    with TestDriver(source_of(rule, [])) as driver:
        driver.send_record(Record("orders", value, b"k"))
        assert len(driver.dead_letters()) == lettered
        assert driver.committed_offsets() == {0: 1}


def test_a_record_that_the_function_fails_for_is_given_to_no_default_handler() -> None:
    got: list[Any] = []
    source = source_of(ByFunction(kind_of), got)
    source.register_default_handler(lambda ctx, value: got.append(value))
    with TestDriver(source) as driver:
        driver.send_record(Record("orders", b"3", b"k"))  # it does not say its type
        driver.send_record(Record("orders", b"4", b"k"))  # the function is wrong
        assert got == [b"3"]
        assert len(driver.dead_letters()) == 1


@pytest.mark.parametrize("raised", [asyncio.CancelledError, type("Panic", (BaseException,), {})])
def test_whatever_the_function_raises_no_record_is_lost(raised: type[BaseException]) -> None:
    """It runs in a callback of the loop, which logs what is raised there, and goes on without the batch."""

    def kind(record: IncomingRecord) -> Any:
        if record.value == b"worst":
            raise raised
        return OrderIn

    got: list[Any] = []
    with TestDriver(source_of(ByFunction(kind), got)) as driver:
        for value in (b'{"order":"a"}', b"worst", b'{"order":"b"}'):
            driver.send_record(Record("orders", value, b"k"))
        assert got == [OrderIn("a"), OrderIn("b")]
        assert [letter.value for letter in driver.dead_letters()] == [b"worst"]
        assert driver.committed_offsets() == {0: 3}


@pytest.mark.parametrize("code", [0, 3])
def test_an_exit_of_the_function_ends_the_source_at_the_records_turn_by_name(
    code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Raised in the callback of the loop it named nothing, and took the records in front of it along."""

    def kind(record: IncomingRecord) -> Any:
        if record.value == b"worst":
            raise SystemExit(code)
        return OrderIn

    got: list[Any] = []
    with pytest.raises(SystemExit) as ended, TestDriver(source_of(ByFunction(kind), got)) as driver:  # noqa: PT012
        for value in (b'{"order":"a"}', b"worst", b'{"order":"b"}'):
            driver.send_record(Record("orders", value, b"k"), wait=False)
        driver.settle()
    assert ended.value.code == code
    assert got == [OrderIn("a")]
    (said,) = [line.getMessage() for line in caplog.records if line.levelname == "CRITICAL"]
    assert said.startswith(f"orders[0]@1: the type rule raised SystemExit: {code}; that is no event's failure")


def test_a_source_that_stops_names_the_rule_and_the_place() -> None:
    with (
        pytest.raises(EventFailure, match=r"orders\[0\]@0: ByField\('kind'\) finds no type in the record"),
        TestDriver(source_of(BY_FIELD, [], decode_policy=STOP)) as driver,
    ):
        driver.send_record(Record("orders", b"{}", b"k"))


def test_a_parked_event_is_kept_as_it_came_and_typed_again() -> None:
    got: list[Any] = []
    source = source_of(BY_FIELD, got, error_policy=PARK)
    with TestDriver(source) as driver:
        driver.send_record(Record("orders", b'{"kind":"placed","order":"bad"}', b"k", [("x", b"1")]))
        driver.send_record(Record("orders", PAID, b"k"))
        [queue] = driver.parked()
        assert [(event.headers, event.value) for event in queue.events] == [
            ((("x", b"1"),), b'{"kind":"placed","order":"bad"}'),
            (None, PAID),
        ]
        driver.advance(3600)
        assert got.count(OrderIn("bad")) > 1


def test_a_replay_reads_by_the_rule() -> None:
    async def replayed() -> list[Any]:
        got: list[Any] = []
        program = source_of(BY_FIELD, got).program()
        assert ("types", "ByField('kind')") in program.fingerprint
        replay = PartitionReplay(program, 0, wall_ms=0)
        done = await replay.handle(
            [IncomingRecord("orders", 0, n, b"k", v, None) for n, v in enumerate((PLACED, b"{}"))]
        )
        replay.close()
        assert [output.value for output in done.outputs] == [b"{}"]
        return got

    assert asyncio.run(replayed()) == [OrderIn("a")]


@pytest.mark.parametrize("policy", [SKIP, STOP])
def test_what_is_sent_to_the_own_topic_would_not_be_read_as_what_it_is(policy: Any) -> None:
    config = EventSourceConfig(group_id="g", topic="orders", num_partitions=1, error_policy=policy)
    source, told = (
        EventSource(config, types=Only(OrderIn)),
        r"own topic, where Only\(OrderIn\) says what a record is",
    )

    @source.on
    def placed(ctx: Any, event: OrderIn) -> None:
        ctx.forward("orders" if event.order == "again" else "elsewhere", event, key=event.order)

    with TestDriver(source) as driver:
        driver.send_record(Record("orders", b'{"order":"on"}', b"k"))
        with nullcontext() if policy is SKIP else pytest.raises(EventFailure, match=told):
            driver.send_record(Record("orders", b'{"order":"again"}', b"k"))
        assert len(driver.outputs("orders")) == 2
        assert driver.outputs("elsewhere", OrderIn) == [OrderIn("on")]


def aggregating(types: TypeRule | None, topic: str) -> EventSource[Any]:
    config = EventSourceConfig(group_id="g", topic="orders", num_partitions=1)
    source = EventSource(config, Aggregate.factory(key=str, state=OrderIn), types=types)
    source.register_default_handler(lambda ctx, record: None)
    rules = source.aggregate(OrderIn(""), events=topic)

    @rules.decide
    def pay(state: OrderIn, command: MoneyIn) -> list[OrderIn]:
        return []

    return source


def test_events_of_an_aggregate_that_cannot_be_sent_are_refused_at_the_start() -> None:
    with pytest.raises(RegistrationError, match=r"events of the aggregate cannot be sent: .*Only\(OrderIn\) says what"):
        TestDriver(aggregating(Only(OrderIn), "orders"))
    declared = aggregating(None, "moves")
    declared.output("others")
    with pytest.raises(RegistrationError, match="the aggregate cannot be sent: the topic 'moves' is not declared"):
        TestDriver(declared)
    for types, topic in ((None, "orders"), (Only(OrderIn), "moves"), (CloudEvents(source="/x"), "orders")):
        TestDriver(aggregating(types, topic)).close()


def test_the_own_topic_as_an_output_is_refused_with_the_reason() -> None:
    with pytest.raises(RegistrationError, match=r"own: orders is the source's own topic, where Only\(OrderIn\) says"):
        source_of(Only(OrderIn), []).output("orders")
    with pytest.raises(RegistrationError, match="own: it needs no declaration as output"):
        source_of(None, []).output("orders")


def test_the_loop_has_our_headers_beside_a_rule_of_the_own_topic() -> None:
    got: list[Any] = []
    source = EventSource(
        EventSourceConfig(group_id="g", topic="orders", num_partitions=1, loop=True),
        types=Only(OrderIn, nulls=Deleted),
    )
    source.input("payments", types=ByField("kind", {"paid": MoneyIn}))

    @source.on
    def placed(ctx: Any, event: OrderIn) -> None:
        ctx.loop(MoneyIn(event.order, 1), key="k")

    source.register_event_type(MoneyIn, lambda ctx, event: got.append(event))
    source.register_event_type(Deleted, lambda ctx, event: got.append(event))
    with TestDriver(source) as driver:
        driver.send_record(Record("orders", b'{"order":"a"}', b"k"))
        driver.send_record(Record("payments", PAID, b"k"))
        driver.send_record(Record("orders", None, b"k"))
        driver.check()
    assert got == [MoneyIn("a", 1), MoneyIn("a", 3), Deleted(b"k")]


def test_looking_at_a_record_does_as_the_source_does() -> None:
    decoder = Decoder(source_of(BY_FIELD, []))
    assert decoder.content(record(PAID)).value == {"order": "a", "cents": 3}
    assert "finds no type" in decoder.content(record(b"{}")).problem
    assert decoder.has_rule("orders")
    assert not decoder.has_rule("other")


def test_the_letter_of_a_traced_event_carries_the_trace_and_not_the_type() -> None:
    carrier = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),)
    stamped = _stamped(BY_FIELD.typed(record(PLACED, ("x", b"1"))), carrier)
    letter = dead_letter("dead", stamped, ValueError("no"), 1, 0)
    assert [name for name, _ in letter.headers or [] if not name.startswith("__kes_dlq")] == ["traceparent", "x"]
    assert ("__kes_dlq_type", b"shop.Placed") in (letter.headers or [])
