"""What a librdkafka member makes of the settings of a source, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from streams.errors import BrokerUnavailable, ConfigError, MembershipFatal
from streams.kafka.group.librdkafka_connect import (
    broker_assignor,
    broker_session_ms,
    classic_assignors,
    connect_librdkafka_group,
    no_other_protocol,
)
from streams.kafka.group.librdkafka_group import GroupLog, Roster, explained
from streams.kafka.group.librdkafka_membership import LibrdkafkaMembership
from streams.kafka.settings import ClientSettings
from streams.kafka.wire import group_bytes
from tests.unit.librdkafka_kit import FakeTakeOver, raw


def test_what_metadata_mean() -> None:
    static = group_bytes.group_metadata("g", 7, "m", "i")
    assert group_bytes.parse_metadata(static).member_id == "m"
    assert group_bytes.parse_metadata(static).generation == 7
    assert group_bytes.parse_metadata(static).is_member
    for data in (raw(-1, "m"), raw(0, "m"), raw(1, "")):
        assert not group_bytes.parse_metadata(data).is_member
    for data in (b"", b"CGMDv3:" + static[7:], b"CGMDv2:\1\0\0\0", static[:12]):
        with pytest.raises(ValueError, match="unknown version"):
            group_bytes.parse_metadata(data)


def connected(*strategies: str, broker_side: bool = False, **settings: int) -> LibrdkafkaMembership:
    where = ClientSettings("127.0.0.1:1")
    return connect_librdkafka_group(where, "g", "t", "i", strategies, broker_side=broker_side, **settings)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("strategies", [("cooperative-sticky",), ("range",), ("roundrobin",), ("roundrobin", "range")])
def test_strategies_that_librdkafka_runs(strategies: tuple[str, ...]) -> None:
    assert classic_assignors(strategies) == ",".join(strategies)
    membership = connected(*strategies)
    membership._make_consumer(GroupLog("127.0.0.1:1", "test")).close()  # librdkafka takes the settings
    membership.close(1.0)


@pytest.mark.parametrize(
    ("strategies", "broker_side", "what"),
    [
        (("incremental",), False, "membership 'streams'"),
        (("cooperative-sticky", "range"), False, "stop all members"),
        (("range", "incremental"), False, "'incremental'"),
        (("roundrobin",), True, "cannot run the strategy 'roundrobin'"),
        (("incremental",), True, "membership 'streams'"),
        (("range", "cooperative-sticky"), True, "takes one strategy"),
    ],
)
def test_strategies_that_cannot_be_run(strategies: tuple[str, ...], broker_side: bool, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        connected(*strategies, broker_side=broker_side)


def test_strategies_of_the_broker() -> None:
    assert broker_assignor(("cooperative-sticky",)) == "uniform"
    assert broker_assignor(("range",)) == "range"


def test_librdkafka_wants_a_rebalance_timeout_that_is_not_below_the_session() -> None:
    with pytest.raises(ConfigError, match="rebalance_timeout_seconds"):
        connected("range", rebalance_timeout_ms=5000)


def test_a_session_of_the_broker_that_is_too_short_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    take_over: Any = FakeTakeOver()
    assert broker_session_ms(take_over, "g", 5000) == 45_000
    assert "does not report" in caplog.text
    take_over.settings = {"consumer.session.timeout.ms": "5000"}
    with pytest.raises(ConfigError, match=r"transaction_timeout_seconds \(5\).*kafka-configs"):
        broker_session_ms(take_over, "g", 5000)
    assert broker_session_ms(take_over, "g", 4999) == 5000


def test_a_group_of_our_own_protocol_is_not_taken_over_by_the_broker() -> None:
    for fine in (Roster(), Roster("consumer", "uniform"), Roster("classic", "cooperative-sticky")):
        no_other_protocol("g", fine)
    with pytest.raises(MembershipFatal, match="membership 'streams'"):
        no_other_protocol("g", Roster("classic", "kes-incremental-1"))
    with pytest.raises(BrokerUnavailable):
        no_other_protocol("g", Roster("classic", ""))


def test_errors_that_pass_and_errors_that_do_not() -> None:
    assert explained("UNKNOWN_TOPIC_OR_PART", "", "g", "i", "t") is None
    for code in (
        "FENCED_INSTANCE_ID", "UNRELEASED_INSTANCE_ID", "INCONSISTENT_GROUP_PROTOCOL", "INVALID_SESSION_TIMEOUT",
        "UNSUPPORTED_ASSIGNOR", "UNSUPPORTED_VERSION", "GROUP_AUTHORIZATION_FAILED", "GROUP_MAX_SIZE_REACHED",
        "INVALID_GROUP_ID",
    ):  # fmt: skip
        assert "shop" in str(explained(code, "text", "shop", "till-1", "orders"))
