"""A librdkafka member from the settings of an event source: what can be mapped, and what is refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from confluent_kafka import Consumer

from streams.errors import BrokerUnavailable, ConfigError, MembershipFatal
from streams.kafka.connection import ConnectionLog
from streams.kafka.group.librdkafka_group import Roster, RosterTakeOver
from streams.kafka.group.librdkafka_membership import LibrdkafkaMembership
from streams.kafka.settings import ClientSettings, build
from streams.kafka.wire import group_bytes
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.security import PLAINTEXT, Security

log = logging.getLogger(__name__)

CLASSIC: Final = ("cooperative-sticky", "range", "roundrobin")
"""librdkafka's own assignors, which are the strategies of the same names."""
EAGER: Final = frozenset({"range", "roundrobin"})
"""Assignors that revoke all partitions of all members at each rebalance."""
BROKER_SIDE: Final = {"cooperative-sticky": "uniform", "range": "range"}
"""Strategies by the broker's assignor that does the same: ``uniform`` is sticky and moves one by one."""

_DEFAULT_SESSION_MS: Final = 45_000
"""Milliseconds: the default of a broker for ``consumer.session.timeout.ms``."""


def classic_assignors(strategies: Sequence[str]) -> str:
    """``partition.assignment.strategy`` for these strategies. ``ConfigError``: librdkafka cannot run them."""
    for name in strategies:
        if name not in CLASSIC:
            raise ConfigError(
                f"membership 'librdkafka' cannot run the strategy {name!r}: its assignors cannot be replaced. Use one "
                f"of {', '.join(CLASSIC)}, or membership 'streams'"
            )
    if len({name in EAGER for name in strategies}) > 1:
        raise ConfigError(
            f"membership 'librdkafka' cannot migrate between {' and '.join(strategies)} while the group runs: "
            "cooperative-sticky rebalances in two rounds, the others in one. Name one strategy, stop all members, "
            "and start them again (offsets and state stay), or use membership 'streams'"
        )
    return ",".join(strategies)


def broker_assignor(strategies: Sequence[str]) -> str:
    """``group.remote.assignor`` for these strategies. ``ConfigError``: the broker has none that does it."""
    if len(strategies) != 1:
        raise ConfigError(
            f"membership 'broker' takes one strategy, not {' and '.join(strategies)}: members may name different ones "
            "while you restart them one by one, and the broker uses what most of them name"
        )
    name = strategies[0]
    if name not in BROKER_SIDE:
        raise ConfigError(
            f"membership 'broker' cannot run the strategy {name!r}: the broker decides, by its assignor 'uniform' "
            "(strategy='cooperative-sticky') or 'range' (strategy='range'). Use one of these, or membership 'streams'"
        )
    return BROKER_SIDE[name]


def connect_librdkafka_group(
    settings: ClientSettings,
    group_id: str,
    topic: str,
    instance: str,
    strategies: Sequence[str],
    *,
    broker_side: bool,
    session_timeout_ms: int = 6000,
    heartbeat_interval_ms: int = 300,
    rebalance_timeout_ms: int = 15000,
    transaction_timeout_ms: int = 5000,
    static: bool = False,
    security: Security = PLAINTEXT,
    alive: Callable[[], bool] = lambda: True,
    changelog: str = "",
) -> tuple[LibrdkafkaMembership, RosterTakeOver]:
    """A membership by librdkafka and the take-over questions. ``membership.close`` closes both. No I/O yet.

    ``broker_side``: the protocol of KIP-848, in which session and heartbeat are settings of the broker, and the two
    here have no effect. Raises ``ConfigError``.
    """
    group_bytes.checked_name("group.id", group_id)
    group_bytes.checked_name("instance", instance, dots=False)
    config = {
        **settings.consumer(partition_eof=False, role="group"),
        "client.id": instance,  # by which the others know our instance name
        "group.id": group_id,
        "max.poll.interval.ms": rebalance_timeout_ms,
        "log_level": 2,  # the toolkit logs what matters itself
    }
    if static:
        config["group.instance.id"] = instance
    eager = False
    if broker_side:
        config |= {"group.protocol": "consumer", "group.remote.assignor": broker_assignor(strategies)}
    else:
        if rebalance_timeout_ms < session_timeout_ms:
            raise ConfigError(
                f"rebalance_timeout_seconds ({rebalance_timeout_ms / 1000:g}) must not be below "
                f"session_timeout_seconds ({session_timeout_ms / 1000:g}) with membership 'librdkafka'"
            )
        config |= {
            "group.protocol": "classic",
            "partition.assignment.strategy": classic_assignors(strategies),
            "session.timeout.ms": session_timeout_ms,
            "heartbeat.interval.ms": heartbeat_interval_ms,
        }
        eager = strategies[0] in EAGER  # those of a member are all eager, or none is
    client = WireClient(settings.bootstrap_servers, instance, security)
    take_over = RosterTakeOver(client, group_id, topic, changelog=changelog)

    def make_consumer(connection_log: ConnectionLog) -> Consumer:
        return build(Consumer, config, connection_log)

    def check(roster: Roster) -> float:
        if not broker_side:
            return session_timeout_ms / 1000
        no_other_protocol(group_id, roster)
        return broker_session_ms(take_over, group_id, transaction_timeout_ms) / 1000

    membership = LibrdkafkaMembership(
        take_over,
        make_consumer,
        group_id,
        topic,
        instance,
        eager=eager,
        broker_side=broker_side,
        static=static,
        rebalance_seconds=rebalance_timeout_ms / 1000,
        client=client,
        alive=alive,
        check=check,
    )
    return membership, take_over


def no_other_protocol(group_id: str, roster: Roster) -> None:
    """Raise ``MembershipFatal`` if the group has members of membership ``streams``; ``BrokerUnavailable``: not known
    yet."""
    # The broker would assign to them, too, by its own protocol, which they do not understand.
    if roster.kind != "classic":
        return
    if not roster.protocol:
        raise BrokerUnavailable(f"group {group_id} rebalances; what its members use is not known yet")
    if roster.protocol not in CLASSIC:
        raise MembershipFatal(
            f"group {group_id}: its members use membership 'streams' ({roster.protocol}), which the broker-side "
            "protocol cannot take over; stop all of them before changing the membership, or use a group id of its own"
        )


def broker_session_ms(take_over: RosterTakeOver, group_id: str, transaction_timeout_ms: int) -> int:
    """Return the broker's session timeout of the group. ``ConfigError`` if the transaction timeout does not fit."""
    setting = take_over.group_settings(time.monotonic() + 2.0).get("consumer.session.timeout.ms", "")
    if not setting:
        log.warning(
            "group %s: the broker does not report the session timeout of the group (consumer.session.timeout.ms); it "
            "must be above transaction_timeout_seconds (%g)",
            group_id,
            transaction_timeout_ms / 1000,
        )
        return _DEFAULT_SESSION_MS
    if int(setting) <= transaction_timeout_ms:
        raise ConfigError(
            f"transaction_timeout_seconds ({transaction_timeout_ms / 1000:g}) must be smaller than the session timeout "
            f"that the broker has for group {group_id}, {int(setting) / 1000:g} s: lower it, or raise "
            "consumer.session.timeout.ms of the group (kafka-configs.sh --entity-type groups)"
        )
    log.info("group %s: the broker's session timeout is %g s", group_id, int(setting) / 1000)
    return int(setting)
