"""The bytes of the group protocol: what is written is read again, and what others write cannot hurt."""

from __future__ import annotations

import contextlib
import os
import random
import warnings

import msgspec
import pytest

from streams.errors import ConfigError
from streams.kafka.wire import group_bytes
from streams.model.group import (
    Assignment,
    Copies,
    MemberReport,
    Order,
    Shelf,
    instance_of,
    transactional_id,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # kafka-python's own use of importlib.resources
    from kafka.protocol.consumer.metadata import ConsumerProtocolAssignment, ConsumerProtocolSubscription

REPORT = MemberReport(
    instance="worker-1",
    owned=frozenset({3, 1}),
    generation=7,
    releasing={3: Order("member-y", 6)},
    incoming=frozenset({5}),
    copies=Copies(
        ready=frozenset({2}),
        preparing={4: 12, 6: 0},
        late=frozenset({6}),
        sizes={1: 1 << 40, 3: 0},
        shelf=Shelf("5e1f", {2: 1 << 40, 6: 0}),
    ),
    leaving=True,
    sequence=1 << 50,
)
ASSIGNMENT = Assignment(
    own=frozenset({1, 2}),
    standby=frozenset({3}),
    preparing=frozenset({4}),
    release={5: "member-x"},
    incoming={6: 0, 7: 12},
    members=("a", "b"),
    sequence=9,
    quit=True,
)


OF_BEFORE = {  # written by the release that spoke the group protocol by kafka-python
    "report": (
        group_bytes.encode_report("topic", REPORT),
        b"\0\x03\0\0\0\x01\0\x05topic\0\0\0\xda\x02\x88\xa8instance\xa8worker-1\xa5owned\x92\x01\x03\xaageneration\x07"
        b"\xa9releasing\x81\x03\x82\xa2to\xa8member-y\xaageneration\x06\xa8incoming\x91\x05\xa6copies\x86\xa5ready\x91\x02"
        b"\xa9preparing\x82\x04\x0c\x06\0\xa4late\x91\x06\xa5sizes\x82\x01\xcf\0\0\x01\0\0\0\0\0\x03\0\xa5asked\0"
        b"\xa5shelf\x82\xa4name\xa45e1f\xa7offsets\x82\x02\xcf\0\0\x01\0\0\0\0\0\x06\0\xa7leaving\xc3"
        b"\xa8sequence\xcf\0\x04\0\0\0\0\0\0\0\0\0\x01\0\x05topic\0\0\0\x02\0\0\0\x01\0\0\0\x03\0\0\0\x07\xff\xff",
    ),
    "report of a newcomer": (
        group_bytes.encode_report("topic", MemberReport(instance="worker-1", sequence=5)),
        b"\0\x03\0\0\0\x01\0\x05topic\0\0\0}\x02\x88\xa8instance\xa8worker-1\xa5owned\x90\xaageneration\xff"
        b"\xa9releasing\x80\xa8incoming\x90\xa6copies\x85\xa5ready\x90\xa9preparing\x80\xa4late\x90\xa5sizes\x80\xa5asked\0"
        b"\xa7leaving\xc2\xa8sequence\x05\0\0\0\0\xff\xff\xff\xff\xff\xff",
    ),
    "assignment": (
        group_bytes.encode_assignment("topic", ASSIGNMENT),
        b"\0\x03\0\0\0\x01\0\x05topic\0\0\0\x02\0\0\0\x01\0\0\0\x02\0\0\0]\x02\x88\xa3own\x92\x01\x02\xa7standby\x91\x03"
        b"\xa9preparing\x91\x04\xa7release\x81\x05\xa8member-x\xa8incoming\x82\x06\0\x07\x0c\xa7members\x92\xa1a\xa1b"
        b"\xa8sequence\t\xa4quit\xc3",
    ),
    "protocol": (group_bytes.protocol("incremental").encode(), b"kes-incremental-2"),
}
"""What this release writes, and what that of before wrote: members of both share a group while it is upgraded."""


@pytest.mark.parametrize("what", OF_BEFORE)
def test_the_bytes_of_before_are_still_written(what: str) -> None:
    """Bytes that are the same are read as what they were written from."""
    written, of_before = OF_BEFORE[what]
    assert written == of_before


def decoded(assignment: Assignment, partitions: int = 10, member: str = "me") -> Assignment:
    return group_bytes.decode_assignment(group_bytes.encode_assignment("topic", assignment), partitions, member)


def test_reports_and_assignments_survive_the_way() -> None:
    data = group_bytes.encode_report("topic", REPORT)
    assert group_bytes.decode_report("topic", "id", data) == (REPORT, None)
    later = {**msgspec.to_builtins(REPORT), "shoe_size": 44}  # a field of a later version is skipped
    data = subscription(b"\x02" + msgspec.msgpack.encode(later))
    assert group_bytes.decode_report("topic", "id", data) == (REPORT, None)
    assert decoded(ASSIGNMENT) == ASSIGNMENT
    assert decoded(Assignment()) == Assignment()


def test_the_usual_tools_see_what_is_owned_and_assigned() -> None:
    subscription = ConsumerProtocolSubscription.decode(group_bytes.encode_report("topic", REPORT))
    assert subscription.topics == ["topic"]
    assert [(entry.topic, entry.partitions) for entry in subscription.owned_partitions] == [("topic", [1, 3])]
    assert subscription.generation_id == 7
    assigned = ConsumerProtocolAssignment.decode(group_bytes.encode_assignment("topic", ASSIGNMENT))
    assert [(entry.topic, entry.partitions) for entry in assigned.assigned_partitions] == [("topic", [1, 2])]


def subscription(user_data: bytes | None, topic: str = "topic") -> bytes:
    encoded: bytes = ConsumerProtocolSubscription(
        version=3,
        topics=[topic],
        user_data=user_data,
        owned_partitions=[ConsumerProtocolSubscription.TopicPartition(topic="topic", partitions=[1, 2])],
        generation_id=4,
    ).encode()
    return encoded


@pytest.mark.parametrize(
    "user_data",
    [
        None,
        b"",
        b"\x01\x80",
        b"\x02",
        b"\x02\x80",
        b"\x02\xc1",
        b"{}",
        b"\x02" + b"\x91" * 5000,
        b"\x02" + bytes(5 << 20),
    ],
    ids=lambda data: repr(data)[:20],
)
def test_a_foreign_member_keeps_what_it_owns_until_it_gives_it_up(user_data: bytes | None) -> None:
    report, wrong = group_bytes.decode_report("topic", "id", subscription(user_data))
    assert report == MemberReport(instance="?id", owned=frozenset({1, 2}), generation=4, leaving=True)
    assert wrong is not None
    assert "user data" in wrong
    assert ("more than any group needs" in wrong) == (len(user_data or b"") > 1 << 20)


def test_a_member_of_another_topic_is_foreign_and_the_message_names_both() -> None:
    report, wrong = group_bytes.decode_report("other", "id", group_bytes.encode_report("topic", REPORT))
    assert (report.leaving, report.owned) == (True, frozenset())
    assert wrong == "it works on 'topic', not on 'other'"


def test_no_bytes_raise_anything_else() -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(1 << 30)
    print("SEED", seed)
    chance = random.Random(seed)
    good = group_bytes.encode_report("topic", REPORT), group_bytes.encode_assignment("topic", ASSIGNMENT)
    for _ in range(3000):
        base = bytearray(chance.choice([*good, chance.randbytes(chance.randrange(60))]))
        for _ in range(chance.randrange(4)):
            if base:
                base[chance.randrange(len(base))] = chance.randrange(256)
        data = bytes(base[: chance.randrange(len(base) + 1)])
        report, _ = group_bytes.decode_report("topic", "id", data)
        assert isinstance(report, MemberReport)
        with contextlib.suppress(ValueError):
            assert isinstance(group_bytes.decode_assignment(data, 10, "me"), Assignment)


def changed(**changes: object) -> MemberReport:
    return msgspec.structs.replace(REPORT, **changes)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"owned": frozenset({-1, 3})}, "a negative partition"),
        ({"incoming": frozenset({-1})}, "a negative partition"),
        ({"copies": Copies(ready=frozenset({-5}))}, "a negative partition"),
        ({"copies": Copies(sizes={-5: 1})}, "a negative partition"),
        ({"copies": Copies(sizes={5: -1})}, "less than nothing"),
        ({"copies": Copies(shelf=Shelf("s", {5: -1}))}, "less than nothing"),
        ({"copies": Copies(shelf=Shelf("s", {-5: 1}))}, "a negative partition"),
        ({"copies": Copies(shelf=Shelf("a\nb"))}, "a bad name"),
        ({"copies": Copies(preparing={5: -1})}, "less than nothing"),
        ({"releasing": {9: Order("m", 1)}}, "it hands over what it does not own"),
        ({"incoming": frozenset({1})}, "it expects what it owns"),
        *(({"releasing": {3: Order(to, 1)}}, "a bad order") for to in ("", "m\n", "m" * 301)),
        ({"releasing": {3: Order("m", -1)}}, "a bad order"),
        ({"instance": ""}, "a bad instance name"),
        ({"instance": "a.b"}, "a bad instance name"),
    ],
)
def test_a_report_that_cannot_be_true_is_foreign(changes: dict[str, object], wrong: str) -> None:
    report = changed(**changes)
    read, why = group_bytes.decode_report("topic", "id", group_bytes.encode_report("topic", report))
    assert read == MemberReport(instance="?id", owned=report.owned, generation=7, leaving=True)
    assert wrong in str(why)


def test_partitions_that_the_topic_does_not_have_are_nobodys() -> None:
    assert group_bytes.within(7, REPORT) == REPORT
    assert group_bytes.within(3, REPORT) == changed(
        owned=frozenset({1}),
        releasing={},
        incoming=frozenset(),
        copies=Copies(ready=frozenset({2}), sizes={1: 1 << 40}, shelf=Shelf("5e1f", {2: 1 << 40})),
    )


class CopiesOfBefore(msgspec.Struct):
    """As a release reads them that knows no folders."""

    ready: frozenset[int]
    preparing: dict[int, int]
    late: frozenset[int]
    sizes: dict[int, int]
    asked: int


def test_a_release_of_before_reads_a_report_with_folders() -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(REPORT))
    assert fields["copies"].keys() - set(CopiesOfBefore.__struct_fields__) == {"shelf"}
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(REPORT.copies), type=CopiesOfBefore)
    assert read.ready == REPORT.copies.ready
    assert read.sizes == REPORT.copies.sizes


def test_without_a_folder_the_bytes_are_those_of_before() -> None:
    """The code of before wrote these."""
    report = MemberReport(instance="a", owned=frozenset({1}), copies=Copies(ready=frozenset({2})))
    user_data = ConsumerProtocolSubscription.decode(group_bytes.encode_report("topic", report)).user_data
    fields = msgspec.msgpack.decode(user_data[1:])
    assert list(fields["copies"]) == ["ready", "preparing", "late", "sizes", "asked"]
    assert user_data.hex() == (
        "0288a8696e7374616e6365a161a56f776e65649101aa67656e65726174696f6effa972656c656173696e6780a8696e636f6d696e6790"
        "a6636f7069657385a572656164799102a9707265706172696e6780a46c61746590a573697a657380a561736b656400"
        "a76c656176696e67c2a873657175656e636500"
    )


@pytest.mark.parametrize(
    ("assignment", "wrong"),
    [
        (Assignment(own=frozenset({10})), "up to 10, this member has 10"),
        (Assignment(standby=frozenset({-1})), "leader knows"),
        (Assignment(incoming={1 << 40: 0}), "leader knows"),
        (Assignment(own=frozenset({1}), release={1: "m"}), "contradictory"),
        (Assignment(own=frozenset({1}), incoming={1: 0}), "contradictory"),
        (Assignment(release={1: "m"}, incoming={1: 0}), "contradictory"),
        (Assignment(release={1: ""}), "receiver"),
        (Assignment(release={1: "me"}), "receiver"),
        (Assignment(incoming={1: -1}), "generation"),
    ],
)
def test_an_assignment_that_cannot_be_done_is_refused(assignment: Assignment, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        decoded(assignment)


def test_a_thousand_partitions_fit() -> None:
    """Well below a broker's limit of some 1 MB for all reports and assignments of a group."""
    everything = range(1000)
    owner = MemberReport(
        instance="worker-1",
        owned=frozenset(everything),
        generation=1 << 20,
        copies=Copies(sizes=dict.fromkeys(everything, 1 << 40)),
        sequence=1 << 50,
    )
    keeper = MemberReport(
        instance="worker-2",
        copies=Copies(ready=frozenset(range(500)), preparing=dict.fromkeys(range(500, 1000), 1 << 30)),
    )
    giver = msgspec.structs.replace(
        owner, releasing={number: Order("worker-2-" + "x" * 36, 9) for number in everything}
    )
    sizes = [len(group_bytes.encode_report("topic", report)) for report in (owner, keeper, giver)]
    assignment = Assignment(
        own=frozenset(range(500)), standby=frozenset(range(500, 1000)), members=tuple(f"worker-{n}" for n in range(100))
    )
    sizes.append(len(group_bytes.encode_assignment("topic", assignment)))
    assert all(size < limit for size, limit in zip(sizes, (20_000, 8_000, 100_000, 8_000), strict=True)), sizes


def test_a_strategy_is_a_protocol_of_its_own() -> None:
    assert group_bytes.protocol("range") == "kes-range-2"
    with pytest.raises(ConfigError, match="strategy"):
        group_bytes.protocol("")


NOBODYS = (
    "shop.eu.worker.kes-0", "shop.eu.worker.kes~", "shop.eu.worker.kes~x", "shop.worker.kes~0", "shop.worker.0",
    "shop.eu.x.worker.kes~0", "shop.eu.x.worker.0", "shop.eu2.worker.kes~0", "shop.eu.worker", "shop.eu.worker.",
    "shop.eu.worker.x", "shop.eu.worker.²", "shop.eu..0", "shop.eu..kes~0", "shop.eu", "",
)  # fmt: skip


def test_a_transactional_id_belongs_to_one_group_only() -> None:
    assert {name: instance_of("shop.eu", name) for name in NOBODYS} == dict.fromkeys(NOBODYS)
    for number in ("0", "17"):
        assert instance_of("shop.eu", f"shop.eu.worker.kes~{number}") == "worker"
        assert instance_of("shop.eu", f"shop.eu.worker.{number}") is None
    assert instance_of("a.b", transactional_id("a.b", "c-d", 3)) == "c-d"


@pytest.mark.parametrize("name", ["", " a", "a\n", "ä", "a" * 201, "a\0b", "host.example"])
def test_names_that_cannot_be_written_are_refused(name: str) -> None:
    """Of an instance a dot as well: it is taken for the end of the group's name."""
    assert group_bytes.checked_name("group.id", "a.b") == "a.b"
    with pytest.raises(ConfigError, match=r"instance must (be|not contain a dot)"):
        group_bytes.checked_name("instance", name, dots=False)


def test_partitions_for_people() -> None:
    assert group_bytes.ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"
    assert group_bytes.ranges([]) == "none"
