"""Tickets and routing of queries, for any question, member and note."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams.errors import ConfigError, StoreError
from streams.kafka.questions.group_view import CLASSIC, GroupView, MemberView
from streams.model.group import Assignment
from streams.queries.routing import Server, candidates, checked_address, servers_of
from streams.queries.tickets import TicketRefused, check_seal, check_ticket, group_secret, seal, ticket
from streams.records import TopicPartition
from streams.runtime.queries.questions import ROWS_IN_A_TURN, Question, TurnRows, checked, read_of
from streams.runtime.status import MemberStatus, note_of
from streams.stores.table import Table
from tests.unit.private_kit import private

SECRET = b"a secret of the group"
Fields = tuple[str, str, bytes, str]
FIELDS = st.tuples(st.sampled_from(["POST", "GET"]), st.text(max_size=9), st.binary(max_size=9), st.text(max_size=9))
HERE = "http://127.0.0.1:9200"


@given(FIELDS, st.floats(0, 4e9))
def test_a_ticket_is_taken_where_and_when_it_is_for(asked: Fields, now: float) -> None:
    check_ticket(SECRET, ticket(SECRET, *asked, now), *asked, now)
    check_ticket(SECRET, ticket(SECRET, *asked, now), *asked, now + 29.0)


@given(FIELDS, FIELDS)
def test_it_is_of_no_use_for_anything_else(asked: Fields, other: Fields) -> None:
    made = ticket(SECRET, *asked, 1e9)
    if asked != other:
        with pytest.raises(TicketRefused, match="not for this request"):
            check_ticket(SECRET, made, *other, 1e9)
    with pytest.raises(TicketRefused, match="secret differs"):
        check_ticket(b"another group's one", made, *asked, 1e9)
    for late in (32.0, 3600.0, -40.0):
        with pytest.raises(TicketRefused, match="too old"):
            check_ticket(SECRET, made, *asked, 1e9 + late)


@given(st.text(max_size=40))
def test_text_is_no_ticket(text: str) -> None:
    with pytest.raises(TicketRefused):
        check_ticket(SECRET, text, "POST", "/", b"", HERE, 1e9)


def test_fields_cannot_be_moved_into_each_other() -> None:
    made = ticket(SECRET, "POST", "/a", b"b", HERE, 1e9)
    with pytest.raises(TicketRefused):
        check_ticket(SECRET, made, "POST", "/ab", b"", HERE, 1e9)


@given(st.binary(max_size=9), st.integers(100, 599), st.binary(max_size=9))
def test_a_seal_is_of_one_answer(body: bytes, status: int, other: bytes) -> None:
    made = seal(SECRET, "a ticket", status, body)
    check_seal(SECRET, made, "a ticket", status, body)
    longer = other + b"x" + body
    for changed in (
        ("another", status, body),
        ("a ticket", status + 1, body),
        ("a ticket", status, longer),
    ):
        with pytest.raises(TicketRefused):
            check_seal(SECRET, made, *changed)


def test_nothing_shows_the_secret() -> None:
    for refused in ("", "kes1:1:2", ticket(SECRET, "POST", "/", b"", "elsewhere", 1e9)):
        with pytest.raises(TicketRefused) as raised:
            check_ticket(SECRET, refused, "POST", "/", b"", HERE, 1e9)
        assert SECRET.decode() not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot be read"), (b"short\n", "less than 16"), (b"", "less than 16")]
)
def test_a_secret_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        private(path, content)
    with pytest.raises(ConfigError, match=says):
        group_secret(str(path))
    with pytest.raises(ConfigError, match="secret_file"):
        group_secret("")


# -- routing -----------------------------------------------------------------------------------------------------------

PARTITIONS = st.frozensets(st.integers(0, 3), max_size=3)
SERVERS = st.lists(
    st.builds(Server, st.sampled_from("abcdef"), st.just(HERE), PARTITIONS, PARTITIONS, PARTITIONS),
    unique_by=lambda server: server.instance,
)


@given(SERVERS, st.integers(0, 3), st.booleans())
def test_everyone_is_asked_once_and_the_owner_first(servers: list[Server], partition: int, copies: bool) -> None:
    found = candidates(servers, partition, copies=copies)
    assert sorted(found) == sorted(servers)
    ranks = [(partition not in it.owned, partition not in it.incoming) for it in found]
    owners = [owner for owner, _ in ranks]
    assert owners == sorted(owners)
    rest = [it for it in found if partition not in it.owned]
    assert [partition not in it.incoming for it in rest] == sorted(partition not in it.incoming for it in rest)
    if copies:
        rest = [it for it in rest if partition not in it.incoming]
        assert [partition not in it.copies for it in rest] == sorted(partition not in it.copies for it in rest)


def note(address: str, copies: tuple[int, ...] = ()) -> str:
    return note_of(MemberStatus(1, "m", 1, 1, copies, (), (), address))


def test_members_are_joined_with_their_notes() -> None:
    plan = Assignment(own=frozenset({1}), release={2: "1"}, incoming={3: 1})
    members = (
        MemberView(member_id="1", instance="a", owned={"in": frozenset({0})}),
        MemberView(member_id="2", instance="b", assignment=plan),
        MemberView(member_id="3", instance="silent"),
        MemberView(member_id="4", instance="older"),
        MemberView(member_id="5", instance="broken"),
        MemberView(member_id="6", instance="forged"),
    )
    older = json.loads(note("", ()))
    del older["address"]
    notes = {
        "a": note(HERE, (1, 3)),
        "b": note("https://b:1"),
        "older": json.dumps(older),
        "broken": "{",
        "forged": note("http://evil.example:80"),
    }
    found = servers_of(GroupView(group="g", kind=CLASSIC, members=members), notes, "in")
    assert found == (
        Server("a", HERE, frozenset({0}), frozenset(), frozenset({1, 3})),
        Server("b", "https://b:1", frozenset({1, 2}), frozenset({3}), frozenset()),
    )


@given(st.text(max_size=50))
def test_a_note_of_anybody_does_no_harm(text: str) -> None:
    member = MemberView(member_id="1", instance="a")
    assert servers_of(GroupView(group="g", kind=CLASSIC, members=(member,)), {"a": text}, "in") == ()


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:1", "ftp://127.0.0.1:1", "http://127.0.0.1", "http://evil:80", "https://a:1/path", "https://u:p@a:1",
     "https://a:99999", "https://a:1?x=1", "http://127.0.0.1.evil:80", "http://[::1"],
)  # fmt: skip
def test_addresses_that_may_not_be_used(address: str) -> None:
    with pytest.raises(ConfigError):
        checked_address(address)


def test_addresses_that_may() -> None:
    for address in (HERE, "http://[::1]:80", "https://member-1.internal:9200"):
        assert checked_address(address) == address


# -- questions ---------------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=400), st.integers(1, 60))
def test_pages_of_a_table_are_all_of_it(content: dict[str, int], limit: int) -> None:
    table = Table.factory(key=str, value=int, ordered=True)(TopicPartition("in", 0))
    table.begin([])
    for key, value in content.items():
        table.put(key, value)
    table.end()
    rows: list[tuple[bytes, bytes]] = []
    while True:
        after = rows[-1][0] if rows else None
        page = read_of(Question(group="g", kind="range", partition=0, after=after, limit=limit), table)
        assert isinstance(page, TurnRows)
        assert len(page.rows) <= limit
        rows += page.rows
        if not page.more:
            break
    assert {table.decode_key(key): table.decode_value(value) for key, value in rows} == content
    assert [key for key, _ in rows] == sorted(key for key, _ in rows)
    assert read_of(Question(group="g", kind="len", partition=0), table) == {"count": len(rows)}


def test_a_turn_is_bounded_and_needs_an_order() -> None:
    question = Question(group="g", kind="range", partition=0)
    for value, rows in ((b"", ROWS_IN_A_TURN), (b"v" * 100_000, 5), (b"v" * 1_000_000, 1)):
        table = Table.factory(key=int, value=bytes, ordered=True)(TopicPartition("in", 0))
        table.begin([])
        for key in range(2_000 if not value else 10):
            table.put(key, value)
        page = read_of(question, table)
        assert isinstance(page, TurnRows)
        assert (len(page.rows), page.more) == (rows, True)
    with pytest.raises(StoreError, match=r"has no order; make it with Table\.factory\(\.\.\., ordered=True\)"):
        read_of(question, Table.factory(key=int, value=bytes)(TopicPartition("in", 0)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"group": "other"}, "for the group"),
        ({"kind": "drop"}, "there are get, len and range"),
        ({"partition": 4}, "there are 0 to 3"),
        ({"partition": -1}, "there are 0 to 3"),
        ({"key": None}, "needs a key"),
        ({"limit": 0}, "1 to 1000"),
        ({"limit": 10**9}, "1 to 1000"),
        ({"timeout_seconds": math.nan}, "more than 0"),
        ({"max_staleness": 0.0}, "more than 0"),
        ({"max_staleness": 1.0, "confirm": True}, "exclude each other"),
    ],
)
def test_bad_questions_are_refused(fields: dict[str, object], says: str) -> None:
    good = {"group": "g", "kind": "get", "partition": 0, "key": b"k"}
    with pytest.raises(ConfigError, match=says):
        checked(Question(**{**good, **fields}), "g", 4)  # type: ignore[arg-type]
