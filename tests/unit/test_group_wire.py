"""The bytes of the group protocol: what is written is read again, and what others write cannot hurt."""

from __future__ import annotations

import contextlib
import os
import random

import msgspec
import pytest

from streams.clients import group_wire
from streams.clients.kafka_python import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from streams.errors import ConfigError
from streams.group import Assignment, MemberReport

REPORT = MemberReport(
    instance="worker-1",
    owned=frozenset({3, 1}),
    generation=7,
    ready=frozenset({2}),
    preparing={4: 12},
    incoming=frozenset({5}),
    leaving=True,
    sequence=1 << 50,
)
ASSIGNMENT = Assignment(
    own=frozenset({1, 2}),
    standby=frozenset({3}),
    preparing=frozenset({4}),
    release={5: "member-x"},
    incoming=frozenset({6}),
    members=("a", "b"),
    sequence=9,
    quit=True,
)


def test_group_metadata_is_what_librdkafka_reads() -> None:
    assert group_wire.group_metadata("g", 5, "m", None) == b"CGMDv2:\x05\x00\x00\x00g\x00m\x00\x01"
    assert group_wire.group_metadata("g", 258, "m", "i") == b"CGMDv2:\x02\x01\x00\x00g\x00m\x00\x00i\x00"


@pytest.mark.parametrize(
    ("generation", "member", "group", "instance"),
    [
        (-1, "m", "g", None),
        (3, "", "g", None),
        (3, "m", "", None),
        (3, "mü", "g", None),
        (3, "m", "g", ""),
        (3, "m\0", "g", None),
    ],
)
def test_metadata_that_the_broker_would_not_fence_cannot_be_built(
    generation: int, member: str, group: str, instance: str | None
) -> None:
    with pytest.raises(ValueError, match=r"not a member|printable ASCII"):
        group_wire.group_metadata(group, generation, member, instance)


def test_reports_and_assignments_survive_the_way() -> None:
    data = group_wire.encode_report("topic", REPORT)
    assert group_wire.decode_report("topic", "id", data) == (REPORT, None)
    assert group_wire.decode_assignment(group_wire.encode_assignment("topic", ASSIGNMENT)) == ASSIGNMENT
    assert group_wire.decode_assignment(group_wire.encode_assignment("topic", Assignment())) == Assignment()


def test_the_usual_tools_see_what_is_owned_and_assigned() -> None:
    subscription = ConsumerProtocolSubscription.decode(group_wire.encode_report("topic", REPORT))
    assert subscription.topics == ["topic"]
    assert [(entry.topic, entry.partitions) for entry in subscription.owned_partitions] == [("topic", [1, 3])]
    assert subscription.generation_id == 7
    assigned = ConsumerProtocolAssignment.decode(group_wire.encode_assignment("topic", ASSIGNMENT))
    assert [(entry.topic, entry.partitions) for entry in assigned.assigned_partitions] == [("topic", [1, 2])]


def test_a_field_of_a_later_version_is_skipped() -> None:
    later = {**msgspec.to_builtins(REPORT), "shoe_size": 44}
    data = subscription(b"\x01" + msgspec.msgpack.encode(later))
    assert group_wire.decode_report("topic", "id", data) == (REPORT, None)


def subscription(user_data: bytes | None, topic: str = "topic") -> bytes:
    return ConsumerProtocolSubscription(
        version=3,
        topics=[topic],
        user_data=user_data,
        owned_partitions=[ConsumerProtocolSubscription.TopicPartition(topic="topic", partitions=[1, 2])],
        generation_id=4,
    ).encode()


@pytest.mark.parametrize("user_data", [None, b"", b"\x02\x80", b"\x01", b"\x01\x80", b"\x01\xc1", b"{}"])
def test_a_foreign_member_keeps_what_it_owns_until_it_gives_it_up(user_data: bytes | None) -> None:
    report, wrong = group_wire.decode_report("topic", "id", subscription(user_data))
    assert report == MemberReport(instance="?id", owned=frozenset({1, 2}), generation=4, leaving=True)
    assert wrong is not None
    assert "user data" in wrong


def test_a_member_of_another_topic_is_foreign_and_the_message_names_both() -> None:
    report, wrong = group_wire.decode_report("other", "id", group_wire.encode_report("topic", REPORT))
    assert (report.leaving, report.owned) == (True, frozenset())
    assert wrong == "it works on 'topic', not on 'other'"


def test_no_bytes_raise_anything_else() -> None:
    seed = int(os.environ.get("SEED", "0")) or random.randrange(1 << 30)
    print("SEED", seed)
    chance = random.Random(seed)
    good = group_wire.encode_report("topic", REPORT), group_wire.encode_assignment("topic", ASSIGNMENT)
    for _ in range(3000):
        base = bytearray(chance.choice([*good, chance.randbytes(chance.randrange(60))]))
        for _ in range(chance.randrange(4)):
            if base:
                base[chance.randrange(len(base))] = chance.randrange(256)
        data = bytes(base[: chance.randrange(len(base) + 1)])
        report, _ = group_wire.decode_report("topic", "id", data)
        assert isinstance(report, MemberReport)
        with contextlib.suppress(ValueError):
            assert isinstance(group_wire.decode_assignment(data), Assignment)


@pytest.mark.parametrize(
    ("transactional_id", "instance"),
    [
        ("shop.eu.worker.0", "worker"),
        ("shop.eu.worker.17", "worker"),
        ("shop.worker.0", None),
        ("shop.eu.x.worker.0", None),
        ("shop.eu2.worker.0", None),
        ("shop.eu.worker", None),
        ("shop.eu.worker.", None),
        ("shop.eu.worker.x", None),
        ("shop.eu.worker.²", None),
        ("shop.eu..0", None),
        ("shop.eu", None),
        ("", None),
    ],
)
def test_a_transactional_id_belongs_to_one_group_only(transactional_id: str, instance: str | None) -> None:
    assert group_wire.instance_of("shop.eu", transactional_id) == instance


def test_transactional_ids_are_read_as_they_are_made() -> None:
    assert group_wire.instance_of("a.b", group_wire.transactional_id("a.b", "c-d", 3)) == "c-d"


@pytest.mark.parametrize("name", ["", " a", "a\n", "ä", "a" * 201, "a\0b"])
def test_names_that_cannot_be_written_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"group\.id must be"):
        group_wire.checked_name("group.id", name)


def test_an_instance_has_no_dot() -> None:
    assert group_wire.checked_name("group.id", "a.b") == "a.b"
    with pytest.raises(ConfigError, match="dot"):
        group_wire.checked_name("instance", "host.example", dots=False)


def test_partitions_for_people() -> None:
    assert group_wire.ranges([3, 0, 1, 2, 7, 9, 10]) == "0-3, 7, 9-10"
    assert group_wire.ranges([]) == "none"
