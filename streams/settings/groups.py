"""The groups of settings of an ``EventSourceConfig``, and the checks that they share with it."""

from __future__ import annotations

import re

import msgspec

from streams.errors import ConfigError
from streams.model.topics import MAX_NAME_LENGTH
from streams.sak.numbers import is_number, is_whole

DELIVERY_SHARE = 0.8
"""Share of a transaction's time in which its records must be acknowledged. So they fail here, with a reason, before the
broker aborts the transaction without one."""

STRATEGIES = ("incremental", "cooperative-sticky", "range", "roundrobin")
"""Strategies that share partitions among the members (``core/strategies.py``)."""
MEMBERSHIPS = ("streams", "broker")
"""Implementations of the group protocol for a member."""
A_DAY = 86_400
"""Seconds of a day."""

NAME = re.compile(r"[A-Za-z0-9._-]+")
"""The characters of names in Kafka."""


def check_name(setting: str, value: object, allowed: re.Pattern[str]) -> None:
    """Check that a value is a name of the allowed characters; else ``ConfigError``."""
    if not isinstance(value, str) or not allowed.fullmatch(value) or len(value) > MAX_NAME_LENGTH:
        raise ConfigError(
            f"{setting} is {value!r}; it must be 1 to {MAX_NAME_LENGTH} characters that match {allowed.pattern}"
        )


def check_topic(setting: str, value: object) -> None:
    """Check that a value can name a topic; else ``ConfigError``."""
    check_name(setting, value, NAME)


def _number(setting: str, value: object) -> None:
    if not is_number(value):
        raise ConfigError(f"{setting} is {value!r}; it must be a number")


def check_type(kinds: tuple[type, ...], setting: str, value: object, wanted: str) -> None:
    """Check that a value is of one of these types; else ``ConfigError``, without the value."""
    if not isinstance(value, kinds):  # the value stays out of the message: it may be a secret in the wrong place
        raise ConfigError(f"{setting} is of type {type(value).__name__}; it must be {wanted}")


def _at_least(setting: str, value: float, least: float) -> None:
    _number(setting, value)
    if not value >= least:
        raise ConfigError(f"{setting} is {value}; it must be {least} or more")


def check_count(setting: str, value: object, least: int) -> None:
    """Check that a value is a whole number of ``least`` or more; else ``ConfigError``."""
    if not is_whole(value):
        raise ConfigError(f"{setting} is {value!r}; it must be a whole number")
    _at_least(setting, value, least)


def check_duration(setting: str, value: float) -> None:
    """Check that a value is a number of seconds, less than a day; else ``ConfigError``."""
    _number(setting, value)
    if not 0 < value < A_DAY:
        raise ConfigError(f"{setting} is {value}; it must be more than 0 and less than a day")


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of transactional producers and its batching rule. Names, and the defaults that are numbers of
    transactions or events, are those of go-kafka-event-source's ``EosConfig``.

    * ``pool_size`` is the number of producers ("slots"), which are used in turn: ``pending_transactions`` + 2 or more.
    * ``pending_transactions`` is the number of sealed transactions that may be under way at a time.
    * ``target_batch_size`` is the number of events or of records, whichever is more, at which a transaction is sealed
      when the pipeline is free. At ``max_batch_size`` intake stops.
    * ``max_batch_bytes`` is the number of bytes of outputs and changes (keys, values, headers) at which intake stops,
      too. If a line is too slow for so much, transactions get smaller.
    * ``batch_delay_seconds`` is the time that a transaction waits for further events when nothing is in flight. 0 sends
      at once. ``None`` waits for as long as commits take, 10 ms at most.
    """

    # One is filled, one commits, and one waits for the markers of its last commit: until they are written a broker lets
    # the same transactional id begin nothing new.
    pool_size: int = 3
    pending_transactions: int = 1
    target_batch_size: int = 1000
    max_batch_size: int = 10_000
    max_batch_bytes: int = 32 * 1024 * 1024  # kept in memory until the outcome is known
    batch_delay_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("pool_size", "pending_transactions", "target_batch_size", "max_batch_size", "max_batch_bytes"):
            check_count(f"PoolConfig.{name}", getattr(self, name), 1)
        if self.batch_delay_seconds is not None:
            _at_least("PoolConfig.batch_delay_seconds", self.batch_delay_seconds, 0)
        if self.pool_size < self.pending_transactions + 2:
            raise ConfigError(
                f"PoolConfig.pool_size is {self.pool_size}; it must be at least pending_transactions + 2 "
                f"({self.pending_transactions + 2}): one is filled, {self.pending_transactions} commit, one cools down"
            )
        if self.max_batch_size < self.target_batch_size:
            raise ConfigError(
                f"PoolConfig.max_batch_size is {self.max_batch_size}; it must be at least target_batch_size "
                f"({self.target_batch_size})"
            )


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The consumer group: how its members share the partitions.

    * ``strategy`` is ``incremental`` (a partition moves once its new owner has restored it), ``cooperative-sticky``,
      ``range`` or ``roundrobin``; or two of them, the wanted one first, while a running group migrates.
    * ``membership`` is who shares the partitions out: ``streams`` (a member of the group, by any strategy) or
      ``broker`` (KIP-848: the broker decides, as ``cooperative-sticky`` or ``range`` do).
    * ``static_membership`` makes ``instance_id`` the group's ``group.instance.id``, too.
    * ``publish_status`` publishes the progress of copies and moves for ``kes group``, as offsets of a group
      ``<group_id>.<instance_id>.status``.

    The others are for ``incremental``:

    * ``num_standbys`` is the number of warm copies of each partition on other members.
    * ``max_moves`` is the number of partitions that are prepared at a time in the group, and ``max_move_bytes`` the
      bytes of their changelogs on disk.
    * ``preparation_timeout_seconds`` is the time after which a copy that is not ready is passed over.
    * ``leave_timeout_seconds`` is the time for which a member that stops hands its partitions over. Then it gives up
      the rest.
    """

    strategy: str | tuple[str, ...] = "incremental"
    membership: str = "streams"
    static_membership: bool = False
    num_standbys: int = 0
    max_moves: int = 64
    max_move_bytes: int = 1024 * 1024 * 1024  # one partition is always allowed, however large
    preparation_timeout_seconds: float = 300.0
    leave_timeout_seconds: float = 10.0
    publish_status: bool = True

    def __post_init__(self) -> None:
        for name, least in (("num_standbys", 0), ("max_moves", 1), ("max_move_bytes", 1)):
            check_count(f"GroupConfig.{name}", getattr(self, name), least)
        check_duration("GroupConfig.preparation_timeout_seconds", self.preparation_timeout_seconds)
        _number("GroupConfig.leave_timeout_seconds", self.leave_timeout_seconds)
        if not 0 <= self.leave_timeout_seconds < A_DAY:
            seconds = f"GroupConfig.leave_timeout_seconds is {self.leave_timeout_seconds}"
            raise ConfigError(f"{seconds}; it must be 0 or more, and less than a day")
        if self.membership == "librdkafka":
            raise ConfigError(
                "GroupConfig.membership 'librdkafka' is no more: leave it out, and keep strategy 'cooperative-sticky', "
                "'range' or 'roundrobin'; membership 'streams' runs all three. Stop all members before you start them "
                "again with it"
            )
        if self.membership not in MEMBERSHIPS:
            raise ConfigError(f"GroupConfig.membership is {self.membership!r}; use one of {', '.join(MEMBERSHIPS)}")
        check_type((str, tuple, list), "GroupConfig.strategy", self.strategy, "a name, or a tuple of two")
        for name in self.strategies:
            if name not in STRATEGIES:
                raise ConfigError(f"GroupConfig.strategy names {name!r}; use one or two of {', '.join(STRATEGIES)}")
        if not 1 <= len(set(self.strategies)) == len(self.strategies):
            raise ConfigError(
                f"GroupConfig.strategy is {self.strategy!r}; name one strategy, or two different ones to migrate"
            )
        if self.membership == "broker" and "incremental" in self.strategies:
            raise ConfigError(
                "GroupConfig.membership 'broker' cannot run the strategy 'incremental' (the broker decides): choose "
                "'cooperative-sticky' or 'range', or membership 'streams'"
            )

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the strategies of ``strategy``, the wanted one first."""
        return (self.strategy,) if isinstance(self.strategy, str) else self.strategy


class TimeoutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The times that an event source waits.

    * ``session_timeout_seconds`` is the time without a heartbeat after which the group gives up a member. It must be
      more than ``transaction_timeout_seconds``, and at least three times ``heartbeat_interval_seconds``.
    * ``transaction_timeout_seconds`` is the time of a transaction after which the broker aborts it.
    * ``heartbeat_interval_seconds`` is the time between two heartbeats.
    * ``rebalance_timeout_seconds`` is the time that members have to take part in a rebalance. The event loop may stand
      still for as long until the event that stops it is noted for the next owners; after as long again the member
      leaves the group.
    * ``drain_timeout_seconds`` is the time for running events when a partition is given up or the source stops.
    * ``call_timeout_seconds`` is the time of one transactional call.
    * ``recovery_timeout_seconds`` is the time to bring a failed transaction to an end. Then the source stops with an
      error.
    """

    # The least that brokers allow unless they are set otherwise (group.min.session.timeout.ms): after a crash the
    # others wait for as long.
    session_timeout_seconds: float = 6.0
    transaction_timeout_seconds: float = 5.0  # below the session's: a transaction must not outlive its membership
    heartbeat_interval_seconds: float = 0.3  # a member learns of a rebalance by a heartbeat, so this late
    rebalance_timeout_seconds: float = 15.0
    drain_timeout_seconds: float = 8.0  # below the rebalance's: the group does not wait longer
    call_timeout_seconds: float = 5.0
    recovery_timeout_seconds: float = 300.0  # restarts of a broker took up to 50

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_duration(f"TimeoutConfig.{name}", getattr(self, name))
        if self.transaction_timeout_seconds >= self.session_timeout_seconds:
            raise ConfigError(
                f"TimeoutConfig.transaction_timeout_seconds ({self.transaction_timeout_seconds}) must be smaller than "
                f"session_timeout_seconds ({self.session_timeout_seconds}): a transaction must not outlive the "
                "membership that it was begun under"
            )
        if self.heartbeat_interval_seconds * 3 > self.session_timeout_seconds:
            raise ConfigError(
                f"TimeoutConfig.heartbeat_interval_seconds ({self.heartbeat_interval_seconds}) must be at most a third "
                f"of session_timeout_seconds ({self.session_timeout_seconds}), or one lost heartbeat ends the session"
            )
        if self.drain_timeout_seconds >= self.rebalance_timeout_seconds:
            raise ConfigError(
                f"TimeoutConfig.drain_timeout_seconds ({self.drain_timeout_seconds}) must be smaller than "
                f"rebalance_timeout_seconds ({self.rebalance_timeout_seconds}), or the group goes on without waiting "
                "for the drain"
            )


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Records that were read and wait to be handled.

    * ``max_queued_records`` and ``max_queued_bytes`` are the records of one partition, and their bytes, beyond which
      that partition is paused.
    * ``max_queued_bytes_total`` is the bytes of all partitions of the process. Beyond half of it, partitions that hold
      their share of the other half are paused, too.
    * ``max_poll_records`` is the number of records that the poll thread hands over at once, at most.
    """

    max_queued_records: int = 5_000
    max_queued_bytes: int = 16 * 1024 * 1024
    max_queued_bytes_total: int = 256 * 1024 * 1024
    max_poll_records: int = 500  # each hand-over waits for the event loop's thread: with a backlog, many at once

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_count(f"QueueConfig.{name}", getattr(self, name), 1)


class StateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """State on disk.

    * ``folder`` is where it is; processes of one machine may share it. Empty: nowhere.
    * ``checkpoint_seconds`` is the time after which committed changes of a partition are written, and
      ``checkpoint_bytes`` the bytes of them at which they are written earlier.
    * ``unwritten_bytes`` is the bytes of committed changes that may wait for the disk in the process.
    * ``memory_bytes`` is the bytes of the caches of all tables on an engine in the process.
    * ``snapshots`` is where snapshots are: a path, or an address that ``pyarrow.fs`` knows (``s3://bucket/kes``).
      Empty: there are none.
    * ``snapshot_seconds`` is the age at which a partition's snapshot is followed by the next one, and
      ``snapshots_kept`` the number that is kept of each partition.
    * ``snapshot_bytes_per_second`` is the rate at which the process writes them, at most. 0: no limit.
    * ``snapshot_secret_file`` is a file with a secret. Snapshots are signed with it, and others are refused."""

    folder: str = ""
    checkpoint_seconds: float = 5.0  # as much of the changelog is read again after a kill
    checkpoint_bytes: int = 8 * 1024 * 1024
    unwritten_bytes: int = 64 * 1024 * 1024
    memory_bytes: int = 256 * 1024 * 1024
    snapshots: str = ""
    snapshot_seconds: float = 900.0  # far below delete.retention.ms: one as old as that has missed tombstones
    snapshots_kept: int = 3
    snapshot_bytes_per_second: int = 32 * 1024 * 1024
    snapshot_secret_file: str = ""

    def __post_init__(self) -> None:
        for name in ("folder", "snapshots", "snapshot_secret_file"):
            check_type((str,), f"StateConfig.{name}", getattr(self, name), "a path as text")
        for name in ("checkpoint_seconds", "snapshot_seconds"):
            check_duration(f"StateConfig.{name}", getattr(self, name))
        if self.snapshots and not self.folder:
            raise ConfigError("StateConfig.snapshots are made of state on disk: set StateConfig.folder")
        least_of = {"checkpoint_bytes": 1, "unwritten_bytes": self.checkpoint_bytes, "memory_bytes": 1 << 20}
        least_of |= {"snapshots_kept": 2, "snapshot_bytes_per_second": 0}
        for name, least in least_of.items():
            check_count(f"StateConfig.{name}", getattr(self, name), least)


class QueryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Queries between processes.

    * ``secret_file`` is a file with the group's secret, the same for all members and readers.
    * ``address`` is published for readers: ``https://HOST:PORT``. ``kes run --queries`` fills it in; where it is set,
      further workers take the ports behind it.
    * ``tls_certificate_file`` and ``tls_key_file`` are those of the server. By ``tls_ca_file`` readers check it; empty:
      by the certificates of the system.
    * ``operate`` lets those who have the secret also act on parked keys: ``kes parked retry``, ``skip-head`` and
      ``drop`` beside running members, and the buttons of the monitor."""

    secret_file: str = ""
    address: str = ""
    tls_certificate_file: str = ""
    tls_key_file: str = ""
    tls_ca_file: str = ""
    operate: bool = False

    def __post_init__(self) -> None:
        check_type((bool,), "QueryConfig.operate", self.operate, "True or False")
        for name in self.__struct_fields__[:-1]:
            check_type((str,), f"QueryConfig.{name}", getattr(self, name), "text")


class ParkingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Parked keys (``PARK``): their pace, and their bounds in each partition.

    * ``first_retry_seconds`` is the time after which the first event of a parked key is tried again. It is doubled with
      each failure, up to ``max_retry_seconds``.
    * ``max_keys`` is the number of parked keys, ``max_key_events`` of the events in the queue of one, and ``max_bytes``
      the bytes of all that is queued.
    * ``when_full`` says what happens at an event that finds no room: ``wait`` (the partition waits, and goes on when
      there is room) or ``stop`` (the source stops)."""

    first_retry_seconds: float = 30.0
    max_retry_seconds: float = 3600.0
    max_keys: int = 1000
    max_key_events: int = 1000
    max_bytes: int = 16 * 1024 * 1024
    when_full: str = "wait"

    def __post_init__(self) -> None:
        for name in ("first_retry_seconds", "max_retry_seconds"):
            check_duration(f"ParkingConfig.{name}", getattr(self, name))
        if self.max_retry_seconds < self.first_retry_seconds:
            raise ConfigError(
                f"ParkingConfig.max_retry_seconds is {self.max_retry_seconds}; it must be first_retry_seconds "
                f"({self.first_retry_seconds}) or more"
            )
        for name in ("max_keys", "max_key_events", "max_bytes"):
            check_count(f"ParkingConfig.{name}", getattr(self, name), 1)
        if self.when_full not in ("wait", "stop"):
            raise ConfigError(f"ParkingConfig.when_full is {self.when_full!r}; use 'wait' or 'stop'")


GROUPS = {
    "group": GroupConfig,
    "timeouts": TimeoutConfig,
    "queues": QueueConfig,
    "pool": PoolConfig,
    "state": StateConfig,
    "queries": QueryConfig,
    "parking": ParkingConfig,
}
"""The groups of settings, by the names that ``EventSourceConfig`` has for them."""
