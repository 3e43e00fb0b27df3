"""Acts on parked keys by the member that owns them: once, over moves, beside other operators; their door; and answers
of queries that say that a key is parked."""

from __future__ import annotations

import asyncio
import http.client
import time
from contextlib import closing, suppress
from typing import Any

import msgspec
import pytest

from streams import PARK
from streams.errors import ConfigError, MembershipLost, NotOwned
from streams.records import Record
from streams.runtime.partition.failures import MOST_TRACES
from streams.runtime.queries import parked
from streams.runtime.queries.operating import answered
from streams.runtime.queries.parked import ParkedReply, ParkedRequest
from streams.runtime.queries.points import PointRead
from streams.settings import GroupConfig, QueryConfig
from streams.testing import TestDriver
from tests.unit.parking_kit import Add, Bank, add, parked_records
from tests.unit.test_query_doors import SECRET, port_of, server, source_at

from streams.queries.operating import ParkedClient  # isort: skip
from streams.queries.routing import Server  # isort: skip
from streams.queries.tickets import SEAL_HEADER, TICKET_HEADER, TicketRefused, check_seal, ticket  # isort: skip
from streams.runtime.queries.questions import Question, Reply  # isort: skip

pytestmark = pytest.mark.usefixtures("quiet")
OPERATE = QueryConfig(operate=True)
__all__ = ["server"]


def ask(driver: TestDriver[Any], action: str = "list", member: int | None = None, **fields: Any) -> ParkedReply:
    """Put a request to the owner, or to this member."""
    number = driver.owner(0) if member is None else member
    assert number is not None
    engine = driver._world.members[number].source._run.present()
    reply: ParkedReply = driver._run(
        answered(engine, ParkedRequest(group="bank", partition=0, action=action, **fields))
    )
    driver.settle()
    assert msgspec.json.decode(msgspec.json.encode(reply), type=ParkedReply) == reply  # as it travels
    return reply


def seen(reply: ParkedReply) -> Any:
    return tuple((each.queue, each.head, each.next) for each in reply.queues)


def numbers(driver: TestDriver[Any], key: str = "a") -> tuple[int, ...]:
    return tuple(driver.store(0).get(key) or ())


def test_an_act_is_done_once_by_whom_it_meets() -> None:
    """The request is put again to the owner, to the next one, and comes late to a later queue of the key."""
    bank = Bank(queries=OPERATE)
    bank.broken = {1, 3}
    with bank.driver(members=2) as driver:
        add(driver, 1)
        there = seen(ask(driver))
        first = ask(driver, "drop", seen=there, as_letters=True)
        assert (first.done, ask(driver).keys) == ((there[0][0],), 0)
        assert ask(driver, "drop", seen=there, as_letters=True).done == ()
        before = driver.owner(0)
        driver.leave(before)
        driver.settle()
        assert driver.owner(0) != before
        add(driver, 2, 3, 4)
        assert ask(driver).queues[0].queue == there[0][0]  # the key is parked again
        assert ask(driver, "drop", seen=there, as_letters=True).done == ()
        assert ask(driver, "skip-head", seen=there).done == ()
        bank.broken = set()
        assert ask(driver, "retry", seen=seen(ask(driver))).done == (there[0][0],)
        assert numbers(driver) == (2, 3, 4)
        assert len(driver.dead_letters()) == 1
        driver.check()


def test_the_events_of_a_queue_come_in_pages() -> None:
    """As they are in the changelog. A page has one event at least, however large it is; of a timer it says whether it
    is set."""
    bank = Bank(queries=OPERATE, decode_policy=PARK)
    bank.broken = {2}
    with bank.driver() as driver:
        add(driver, 100, 2, 3)
        driver.send_record(Record("adds", bytes(600_000), b"a", [("__grt__", b"Add")], 0))
        driver.send_record(Record("adds", b"7", b"a", [("__grt__", b"Add")], 0))
        driver.advance(6)
        [there] = ask(driver).queues
        found, first = list[tuple[int, str, bool]](), there.head
        while True:
            reply = ask(driver, queue=there.queue, first=first)
            found += [(event.number, event.queued.place, event.is_set) for event in reply.events_of_it]
            assert reply.queues == ask(driver, queue=there.queue).queues
            if not reply.more:
                break
            first = found[-1][0] + 1
        assert [number for number, _, _ in found] == list(range(there.head, there.next))
        assert [place.partition("@")[0] for _, place, _ in found] == ["adds"] * 4 + ["timer t"]
        assert [is_set for _, _, is_set in found] == [False] * 4 + [True]
        assert ask(driver, queue="0" * 32, first=0).events_of_it == ()


def test_the_trace_of_the_last_failure_is_its_owners() -> None:
    """Of the attempt that the queue's record names, and made by this process; in a list of all keys there is none."""
    bank = Bank(queries=OPERATE)
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1)
        for _ in range(2):  # the one that parked it, and one of the head
            [there] = ask(driver).queues
            assert there.trace == ""
            [alone] = ask(driver, queue=there.queue).queues
            assert "parking_kit.py" in alone.trace
            assert len(alone.trace.splitlines()) == 2
            driver.advance(40)
        traces = driver._worker(0).traces  # type: ignore[union-attr]
        for number in range(MOST_TRACES):
            traces.note(f"@park/{number}", ValueError("another"))
        assert ask(driver, queue=there.queue).queues == ask(driver).queues
        traces.note(f"@park/{there.queue}", ValueError("one that was never committed"))
        assert ask(driver, queue=there.queue).queues == ask(driver).queues
        assert len(traces._by_name) == MOST_TRACES


@pytest.mark.parametrize("trouble", ["lost reply", "lost request", "abort", "crash", "evict"])
def test_an_act_whose_answer_is_lost_is_done_once(trouble: str) -> None:
    bank = Bank(queries=OPERATE)
    bank.broken = {1, 2}
    with bank.driver(members=2) as driver:
        add(driver, 1, 2, 3)
        there, owner = seen(ask(driver)), driver.owner(0)
        assert owner is not None
        {
            "lost reply": lambda: driver.lose_reply("commit", owner),
            "lost request": lambda: driver.lose_request("commit", owner),
            "abort": lambda: driver.abort(owner),
            "crash": lambda: driver.at("commit.before", driver.crash),
            "evict": lambda: driver.at("commit.before", driver.evict),
        }[trouble]()
        engine = driver._world.members[owner].source._run.present()
        request = ParkedRequest(group="bank", partition=0, action="skip-head", seen=there)

        async def put() -> Any:
            async with asyncio.timeout(5):
                return await answered(engine, request)

        with suppress(MembershipLost, NotOwned, TimeoutError):
            driver._run(put())
        driver.advance(30)
        driver.settle()
        ask(driver, "skip-head", seen=there)
        assert [record.offset for record in driver.parked()[0].events] == [1, 2]  # 2 is not let go with 1
        driver.check()


def test_what_cannot_be_kept_as_letters_does_not_go() -> None:
    """The act waits for the topic, as all letters do; its client does not know, and may put it again."""
    bank = Bank(queries=OPERATE)
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 1, 2)
        broker: Any = driver._world.broker
        broker.refuses = lambda topic, entry: topic.endswith("dead-letters")
        engine, there = driver._world.members[0].source._run.present(), seen(ask(driver))
        request = ParkedRequest(group="bank", partition=0, action="drop", seen=there, as_letters=True)

        async def put() -> ParkedReply:
            async with asyncio.timeout(5):
                return await answered(engine, request)

        with pytest.raises(TimeoutError):
            driver._run(put())
        assert parked_records(driver)
        broker.refuses = lambda topic, entry: False
        driver.advance(5)
        assert ask(driver, "drop", seen=there, as_letters=True).done == ()
        assert (len(driver.dead_letters()), parked_records(driver)) == (2, {})
        driver.check()


def test_two_operators_at_once_let_one_event_go() -> None:
    bank = Bank(queries=OPERATE)
    bank.broken = {1, 2}
    with bank.driver() as driver:
        add(driver, 1, 2, 3)
        engine, there = driver._world.members[0].source._run.present(), seen(ask(driver))
        request = ParkedRequest(group="bank", partition=0, action="skip-head", seen=there)

        async def both() -> list[ParkedReply]:
            return list(await asyncio.gather(*(answered(engine, request) for _ in range(2))))

        assert sorted(len(reply.done) for reply in driver._run(both())) == [0, 1]
        driver.settle()
        assert [record.offset for record in driver.parked()[0].events] == [1, 2]
        driver.check()


def test_only_an_owner_with_the_right_acts() -> None:
    bank = Bank()
    bank.broken = {1}
    with bank.driver(members=2) as driver:
        add(driver, 1)
        there, owner = seen(ask(driver)), driver.owner(0)
        with pytest.raises(ConfigError, match=r"QueryConfig\.operate is not set"):
            ask(driver, "drop", seen=there)
        assert owner is not None
        with pytest.raises(NotOwned):
            ask(driver, "drop", member=1 - owner, seen=there)
        assert len(driver.parked()) == 1


def test_queues_are_listed_by_age_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked, "PAGE", 2)
    bank = Bank(queries=OPERATE)
    bank.broken = {1}
    keys = ["new\nline", "\x1b[31m", "k" * 1000, "é" * 200, ""]
    with bank.driver() as driver:
        for key in keys:
            driver.send(Add(1, "x"), key=key, partition=0)
            driver.advance(0.01)
        found, reply = [], ask(driver)
        while True:
            found += list(reply.queues)
            if not reply.more:
                break
            reply = ask(driver, after=found[-1].place)
        assert [(each.key, each.key_bytes) for each in found] == [
            (key.encode()[:256], len(key.encode())) for key in keys
        ]
        assert (reply.keys, reply.events) == (5, 5)
        [alone] = ask(driver, queue=found[2].queue).queues
        assert msgspec.structs.replace(alone, trace="") == found[2]
        assert ask(driver, queue="0" * 32).queues == ()
        assert ask(driver, "retry", seen=seen(reply)).done == (found[-1].queue,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group": "other"}, "is for the group 'other'"),
        ({"partition": 1}, "partition 1"),
        ({"partition": -1}, "partition -1"),
        ({"action": "delete"}, "the action is 'delete'"),
        ({"action": "drop"}, "an act names the queues"),
        ({"seen": (("0" * 32, 0, 1),)}, "a list names none"),
        ({"action": "drop", "seen": (("0" * 32, 0, 1),) * 201}, "200 at most; a list names none"),
        ({"action": "drop", "seen": (("0" * 32, 0, 1),) * 2}, "each queue once"),
        ({"action": "drop", "seen": (("../x", 0, 1),)}, "32 hexadecimal digits"),
        ({"queue": "A" * 32}, "32 hexadecimal digits"),
        ({"action": "retry", "seen": (("0" * 32, 0, 1),), "as_letters": True}, "retry lets nothing go"),
    ],
)
def test_requests_that_cannot_be_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParkedRequest(**{"group": "bank", "partition": 0} | fields).checked("bank", 1)


def post(server: Any, path: str, ticket_path: str, body: bytes, secret: bytes = SECRET) -> tuple[int, bytes]:
    asked = ticket(secret, "POST", ticket_path, body, server.address, time.time())
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=30)) as connection:
        connection.request("POST", path, body, {TICKET_HEADER: asked})
        answer = connection.getresponse()
        content = answer.read()
        if sealed := answer.getheader(SEAL_HEADER):
            check_seal(SECRET, sealed, asked, answer.status, content)
        return answer.status, content


def test_a_ticket_to_read_is_none_to_act(server: Any) -> None:
    request = msgspec.json.encode(ParkedRequest(group="shop", partition=0))
    assert post(server, ParkedRequest.path, ParkedRequest.path, request)[0] == 421  # the source does not run
    for path, of in ((ParkedRequest.path, Question.path), (Question.path, ParkedRequest.path)):
        assert post(server, path, of, request)[0] == 401
    assert post(server, ParkedRequest.path, ParkedRequest.path, request, b"another secret of some")[0] == 401
    for body in (b"", b"[]", request[:-1], b'{"group":"shop","partition":0,"more":1}', b"\xff"):
        status, content = post(server, ParkedRequest.path, ParkedRequest.path, body)
        assert (status, b"cannot be read" in content) == (400, True), body


async def test_a_client_says_what_it_does_not_know(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that is silent may have acted; one of an older release has no such door; a wrong secret is named."""
    source = source_at(server)
    async with ParkedClient(source.config) as client:
        owner = Server("w-0", server.address, frozenset(range(4)))
        client._finder._read_group = lambda seconds: (owner,)  # type: ignore[method-assign]
        queue: Any = parked.ParkedQueue(
            queue="0" * 32, key=b"k", key_bytes=1, head=0, next=1, size=1, since_ms=1, attempts=1, due_ms=1,
            error="", handler="",
        )  # fmt: skip
        with pytest.raises(NotOwned, match=r"not running\. It may have been carried out: see kes parked list"):
            await client.act(0, "drop", [queue.named], timeout_seconds=1.0)
        with monkeypatch.context() as older:
            older.setattr(ParkedRequest, "path", "/api/v1/not-yet")
            with pytest.raises(NotOwned, match="has no /api/v1/not-yet: its release is older"):
                await client.listed(0, timeout_seconds=1.0)
        client._secret = b"another secret of some"
        with pytest.raises(TicketRefused, match="does not accept the ticket: secret or clocks differ"):
            await client.act(0, "drop", [queue.named], timeout_seconds=1.0)


# -- answers of queries ------------------------------------------------------------------------------------------------


def point(driver: TestDriver[Any], found: list[tuple[bytes | None, bool]], **fields: Any) -> None:
    """Read one key as another process does."""
    source = driver._world.members[0].source

    async def ask() -> None:
        question = Question(group="bank", kind="get", partition=0, **{"key": b"a"} | fields)
        read = PointRead(question, asyncio.get_running_loop().create_future())
        source._run.queries().points.read([read], lambda one: one.waiter.set_result(None))
        await read.waiter
        assert isinstance(read.outcome, Reply)
        found.append((read.outcome.value, read.outcome.parked))

    driver._world.loop.create_task(ask())


def test_an_answer_says_that_its_key_is_parked() -> None:
    bank = Bank(group=GroupConfig(num_standbys=1))
    bank.broken = {2}
    with bank.driver(members=2) as driver:
        add(driver, 1, 2, 3)
        add(driver, 7, key="b")
        driver.advance(3)  # the copy is warm
        owner = driver.owner(0)
        assert owner is not None
        sources = [driver._world.members[number].source for number in (owner, 1 - owner)]

        def asked(number: int, key: bytes | None, **more: Any) -> Any:
            local = sources[number]._run.queries()
            answer = driver._run(local.query(0, lambda store: store.get("a"), key=key, timeout_seconds=3.0, **more))
            return answer.value, answer.parked

        assert driver._run(sources[0].query("a", lambda store: store.get("a"))).parked
        for number, more in ((0, {}), (0, {"confirm": True}), (1, {"max_staleness": 1.0})):
            assert asked(number, b"a", **more) == ((1,), True), more
            assert asked(number, b"b", **more) == ((1,), False), more
            assert asked(number, None, **more) == ((1,), False), more
        bank.broken = set()
        driver.retry_parked("a")
        driver.advance(3)
        for number, more in ((0, {}), (1, {"max_staleness": 1.0})):
            assert asked(number, b"a", **more) == ((1, 2, 3), False), more


def test_the_answer_to_another_process_says_so_of_what_is_committed() -> None:
    """Also where the records have another key than the table; and not before the transaction that parks the key is
    committed."""
    bank = Bank()
    bank.broken = {1}
    with bank.driver() as driver:
        add(driver, 5, key="b")
        found: list[Any] = []
        driver._run(driver._world.members[0].source.query("a", lambda store: None))  # the lease
        parks = driver.at("send_offsets.before", lambda member: point(driver, found))
        commits = driver.at("commit.after", lambda member: found.append("committed"))
        add(driver, 1)
        driver.advance(1)
        assert (parks.sprung, commits.sprung) == (1, 1)
        assert found == ["committed", (None, True)]
        del found[:]
        point(driver, found, key=b"b")
        point(driver, found, key=b"b", record_key=b"a")
        point(driver, found, key=b"a", record_key=b"b")
        driver.advance(1)
        assert sorted(found, key=str) == [(None, False), (b"[5]", False), (b"[5]", True)]
