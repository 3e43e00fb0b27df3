"""What a member of a group that the broker shares out meets, and gives up for: by an error that says what to do."""

from __future__ import annotations

import pytest

from streams.errors import ConfigError, MembershipFatal
from streams.kafka.wire.codes import Code
from streams.testing.simulation.virtual_time import elapse

from .broker_kit import SESSION, BrokerMember, Scene, SharedGroup, fatal, play, scenes_of, shared
from .member_kit import until
from .wire_asker import Asker


async def a_group_of_members_of_ours_is_not_taken_over(asker: Asker, group: SharedGroup) -> None:
    group.classic = "kes-incremental-2"
    member = BrokerMember(asker, "a")
    await until(member.is_fatal)
    assert isinstance(fatal(member), MembershipFatal)
    assert "stop all of them" in str(fatal(member))
    assert "ConsumerGroupHeartbeat" not in member.machine.sent


async def a_group_that_rebalances_is_waited_for(asker: Asker, group: SharedGroup) -> None:
    group.classic = ""
    member = BrokerMember(asker, "a")
    await elapse(SESSION + 5.0)
    assert member.events == []
    group.classic = None
    await shared(member)


async def a_group_of_another_program_is_refused_by_name(asker: Asker, group: SharedGroup) -> None:
    """The broker would convert it, and share the partitions out between both."""
    began, group.classic = asker.loop.time(), "range"
    member = BrokerMember(asker, "a")
    await until(member.is_fatal)
    assert asker.loop.time() - began > SESSION, "a session may be all that is left of it"
    assert "another at /10.0.0.7" in str(fatal(member))
    assert "ConsumerGroupHeartbeat" not in member.machine.sent


async def a_program_that_speaks_the_brokers_protocol_itself_is_refused_by_name(
    asker: Asker, group: SharedGroup
) -> None:
    group.foreign = [("java", "q8L1hZ0mT3eR5yW7uQ2kXA")]
    member = BrokerMember(asker, "a")
    await until(member.is_fatal)
    assert "(java at )" in str(fatal(member))
    assert "ConsumerGroupHeartbeat" not in member.machine.sent
    group.foreign = [("b", "5cbd5f3b-8f68-4a53-b1b7-f2d0d6a1b7a9")]  # a member of a release before
    await shared(BrokerMember(asker, "c"))


async def what_a_stopped_program_left_is_waited_out(asker: Asker, group: SharedGroup) -> None:
    group.classic = "range"
    member = BrokerMember(asker, "a")
    await elapse(SESSION - 1.0)
    assert member.events == []
    group.classic = None
    await shared(member)


async def a_group_that_the_broker_does_not_convert_is_fatal_after_a_session(asker: Asker, group: SharedGroup) -> None:
    began, group.refuses = asker.loop.time(), [int(Code.GROUP_ID_NOT_FOUND)] * 1000
    member = BrokerMember(asker, "a")
    await until(member.is_fatal)
    assert asker.loop.time() - began > SESSION
    assert "group.consumer.migration.policy" in str(fatal(member))


async def a_transaction_that_outlives_the_brokers_session_is_refused(asker: Asker, group: SharedGroup) -> None:
    member = BrokerMember(asker, "a", transaction_ms=6000)
    await until(member.is_fatal)
    assert isinstance(fatal(member), ConfigError)
    assert "transaction_timeout_seconds (6)" in str(fatal(member))
    assert "kafka-configs" in str(fatal(member))
    group.configs = Code.CLUSTER_AUTHORIZATION_FAILED
    await shared(BrokerMember(asker, "b", transaction_ms=6000))


@pytest.mark.parametrize("scene", scenes_of(globals()), ids=lambda scene: scene.__name__)
def test_scene(scene: Scene) -> None:
    play(scene)


def test_another_program_that_comes_later_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The broker lets it in, whatever the members say. No further member of ours joins beside it."""

    async def scene(asker: Asker, group: SharedGroup) -> None:
        first, second = BrokerMember(asker, "a"), BrokerMember(asker, "b")
        await shared(first, second)
        group.classics = ["rdkafka"]
        third = BrokerMember(asker, "c")
        await until(third.is_fatal)
        assert "rdkafka at /h" in str(fatal(third))
        await elapse(60.0)
        said = [record.getMessage() for record in caplog.records if record.name.endswith("broker_membership")]
        assert len([text for text in said if "rdkafka at /h" in text]) == 2, "each says it once"
        assert not first.is_fatal()
        assert not second.is_fatal()

    play(scene)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (Code.UNSUPPORTED_ASSIGNOR, "group.consumer.assignors"),
        (Code.UNSUPPORTED_VERSION, "Kafka 4.0"),
        (Code.GROUP_AUTHORIZATION_FAILED, "needs Read on group"),
        (Code.TOPIC_AUTHORIZATION_FAILED, "needs Describe on topic"),
        (Code.GROUP_MAX_SIZE_REACHED, "group.max.size"),
        (Code.INVALID_GROUP_ID, "refuses this group id"),
        (Code.INVALID_REQUEST, "INVALID_REQUEST"),
    ],
)
def test_a_refusal_is_fatal_by_name(code: Code, said: str) -> None:
    async def scene(asker: Asker, group: SharedGroup) -> None:
        group.refuses = [code]
        member = BrokerMember(asker, "a")
        await until(member.is_fatal)
        assert said in str(fatal(member))

    play(scene)
