"""Settings: frozen, keyword-only, units in the names, checked when they are built.

A wrong value is a ``ConfigError`` that names the setting, raised where the settings are made, not where they are used.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from streams.errors import ConfigError
from streams.metrics import MetricsHandler
from streams.outcomes import STOP, Retry
from streams.sak.numbers import is_number, is_whole
from streams.settings_sources import TakesOutsideSettings, bootstrap_servers, flat, variable, without_credentials
from streams.topics import MAX_NAME_LENGTH, changelog_name, commit_log_name, dead_letter_name, loop_name

BOOTSTRAP_VARIABLE = variable(("bootstrap_servers",))
"""Environment variable with the brokers' addresses, used when the settings name none."""
INSTANCE_VARIABLE = "KES_INSTANCE_ID"
"""Environment variable with this process's stable name, if the settings have none (``kes run`` sets it)."""

DELIVERY_SHARE = 0.8
"""Share of a transaction's time in which its records must be acknowledged: they fail before the broker aborts it."""

STRATEGIES = ("incremental", "cooperative-sticky", "range", "roundrobin")
"""Strategies that share partitions among the members (``core/strategies.py``)."""
MEMBERSHIPS = ("streams", "librdkafka", "broker")
"""Implementations of the group protocol for a member."""
A_DAY = 86_400
"""In seconds."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_INSTANCE = re.compile(r"[A-Za-z0-9_-]+")


def _check_name(setting: str, value: object, allowed: re.Pattern[str]) -> None:
    if not isinstance(value, str) or not allowed.fullmatch(value) or len(value) > MAX_NAME_LENGTH:
        raise ConfigError(
            f"{setting} is {value!r}; it must be 1 to {MAX_NAME_LENGTH} characters that match {allowed.pattern}"
        )


def check_topic(setting: str, value: object) -> None:
    """Check that a value can name a topic; else ``ConfigError``."""
    _check_name(setting, value, _NAME)


def _number(setting: str, value: object) -> None:
    if not is_number(value):
        raise ConfigError(f"{setting} is {value!r}; it must be a number")


def _made_of(kinds: tuple[type, ...], setting: str, value: object, wanted: str) -> None:
    if not isinstance(value, kinds):  # what it is may be a secret
        raise ConfigError(f"{setting} is of type {type(value).__name__}; it must be {wanted}")


def _at_least(setting: str, value: float, least: float) -> None:
    _number(setting, value)
    if not value >= least:
        raise ConfigError(f"{setting} is {value}; it must be {least} or more")


def _count(setting: str, value: object, least: int) -> None:
    if not is_whole(value):
        raise ConfigError(f"{setting} is {value!r}; it must be a whole number")
    _at_least(setting, value, least)


def _duration(setting: str, value: float) -> None:
    _number(setting, value)
    if not 0 < value < A_DAY:
        raise ConfigError(f"{setting} is {value}; it must be more than 0 and less than a day")


def host_name() -> str:
    """Return this machine's name, as a part of instance names: dots and the like become dashes."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64]


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The pool of transactional producers and its batching rule (names and defaults of go-kafka-event-source's
    ``EosConfig``).

    ``pool_size``: producers ("slots") used in turn; at least ``pending_transactions`` + 2, because one transactional id
    cannot commit back to back. ``pending_transactions``: sealed transactions that may be under way at a time.
    ``target_batch_size``, ``max_batch_size``: events or records (whichever is more) at which a transaction is sealed
    when the pipeline is free, and at which intake stops. ``max_batch_bytes``: intake also stops at so many bytes of
    outputs and changes (keys, values and headers), because they are kept until their outcome is known; if a line is too
    slow for so much, transactions get smaller. ``batch_delay_seconds``: how long a transaction waits for further events
    when nothing is in flight; 0 sends at once. ``None``: as long as commits take, at most 10 ms.
    """

    pool_size: int = 3
    pending_transactions: int = 1
    target_batch_size: int = 1000
    max_batch_size: int = 10_000
    max_batch_bytes: int = 32 * 1024 * 1024
    batch_delay_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("pool_size", "pending_transactions", "target_batch_size", "max_batch_size", "max_batch_bytes"):
            _count(f"PoolConfig.{name}", getattr(self, name), 1)
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

    ``strategy``: ``incremental`` (a partition moves once its new owner has restored it), ``cooperative-sticky``,
    ``range``, ``roundrobin``; two of them, the wanted one first, while a running group migrates. ``membership``: the
    implementation of the group protocol: ``streams`` (all strategies), ``librdkafka`` (its classic one; not
    ``incremental``), ``broker`` (KIP-848: the broker decides). ``static_membership`` makes ``instance_id`` the group's
    ``group.instance.id`` too. ``publish_status``: publish the progress of copies and moves for ``kes group`` (offsets
    of a group ``<group_id>.<instance_id>.status``).

    For ``incremental``: ``num_standbys`` warm copies of each partition on other members; ``max_moves`` and
    ``max_move_bytes`` (changelog bytes on disk) that are prepared at a time in the group; a copy that is not ready
    after ``preparation_timeout_seconds`` is passed over; a member that stops hands its partitions over for
    ``leave_timeout_seconds``, then gives up the rest.
    """

    strategy: str | tuple[str, ...] = "incremental"
    membership: str = "streams"
    static_membership: bool = False
    num_standbys: int = 0
    max_moves: int = 64
    max_move_bytes: int = 1024 * 1024 * 1024
    preparation_timeout_seconds: float = 300.0
    leave_timeout_seconds: float = 10.0
    publish_status: bool = True

    def __post_init__(self) -> None:
        for name, least in (("num_standbys", 0), ("max_moves", 1), ("max_move_bytes", 1)):
            _count(f"GroupConfig.{name}", getattr(self, name), least)
        _duration("GroupConfig.preparation_timeout_seconds", self.preparation_timeout_seconds)
        _number("GroupConfig.leave_timeout_seconds", self.leave_timeout_seconds)
        if not 0 <= self.leave_timeout_seconds < A_DAY:
            seconds = f"GroupConfig.leave_timeout_seconds is {self.leave_timeout_seconds}"
            raise ConfigError(f"{seconds}; it must be 0 or more, and less than a day")
        if self.membership not in MEMBERSHIPS:
            raise ConfigError(f"GroupConfig.membership is {self.membership!r}; use one of {', '.join(MEMBERSHIPS)}")
        _made_of((str, tuple, list), "GroupConfig.strategy", self.strategy, "a name, or a tuple of two")
        for name in self.strategies:
            if name not in STRATEGIES:
                raise ConfigError(f"GroupConfig.strategy names {name!r}; use one or two of {', '.join(STRATEGIES)}")
        if not 1 <= len(set(self.strategies)) == len(self.strategies):
            raise ConfigError(
                f"GroupConfig.strategy is {self.strategy!r}; name one strategy, or two different ones to migrate"
            )
        if self.membership != "streams" and "incremental" in self.strategies:
            raise ConfigError(
                f"GroupConfig.membership {self.membership!r} cannot run the strategy 'incremental' (its assignors "
                "cannot be replaced): choose another strategy, or membership 'streams'"
            )

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the strategies of ``strategy``, the wanted one first."""
        return (self.strategy,) if isinstance(self.strategy, str) else self.strategy


class TimeoutConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The times that an event source waits.

    ``session_timeout_seconds``: the group gives up a member after so long without a heartbeat. It must be more than
    ``transaction_timeout_seconds``, and at least three times ``heartbeat_interval_seconds``.
    ``rebalance_timeout_seconds``: for members to take part in a rebalance; also how long the event loop may stand still
    before the member leaves the group. ``drain_timeout_seconds``: for running events when a partition is given up or
    the source stops. ``call_timeout_seconds``: for one transactional call. ``recovery_timeout_seconds``: for bringing a
    failed transaction to an end before the source stops with an error.
    """

    session_timeout_seconds: float = 6.0
    transaction_timeout_seconds: float = 5.0
    heartbeat_interval_seconds: float = 0.3
    rebalance_timeout_seconds: float = 15.0
    drain_timeout_seconds: float = 8.0
    call_timeout_seconds: float = 5.0
    recovery_timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _duration(f"TimeoutConfig.{name}", getattr(self, name))
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

    ``max_queued_records`` and ``max_queued_bytes`` are per partition; beyond either the partition is paused.
    ``max_queued_bytes_total`` is for all partitions of the process: beyond half of it, partitions that hold their share
    of the other half are paused, too. ``max_poll_records``: records that the poll thread hands over at once. Each
    hand-over waits for the event loop's thread, so with a backlog many at once cost less.
    """

    max_queued_records: int = 5_000
    max_queued_bytes: int = 16 * 1024 * 1024
    max_queued_bytes_total: int = 256 * 1024 * 1024
    max_poll_records: int = 500

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _count(f"QueueConfig.{name}", getattr(self, name), 1)


class StateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """State on disk: in ``folder`` (empty: nowhere), which processes of one machine may share. ``checkpoint_seconds``,
    ``checkpoint_bytes``: what of a partition may wait to be written; ``unwritten_bytes``: of the process.
    ``memory_bytes``: for the caches of all tables on an engine, of the process.

    ``snapshots``: a path, or an address that ``pyarrow.fs`` knows (``s3://bucket/kes``); empty: none. One of each
    partition is made every ``snapshot_seconds``, ``snapshots_kept`` are kept, ``snapshot_bytes_per_second`` are written
    at most (0: no limit). ``snapshot_secret_file``: with its content they are signed, and others refused."""

    folder: str = ""
    checkpoint_seconds: float = 5.0
    checkpoint_bytes: int = 8 * 1024 * 1024
    unwritten_bytes: int = 64 * 1024 * 1024
    memory_bytes: int = 256 * 1024 * 1024
    snapshots: str = ""
    snapshot_seconds: float = 900.0
    snapshots_kept: int = 3
    snapshot_bytes_per_second: int = 32 * 1024 * 1024
    snapshot_secret_file: str = ""

    def __post_init__(self) -> None:
        for name in ("folder", "snapshots", "snapshot_secret_file"):
            _made_of((str,), f"StateConfig.{name}", getattr(self, name), "a path as text")
        for name in ("checkpoint_seconds", "snapshot_seconds"):
            _duration(f"StateConfig.{name}", getattr(self, name))
        if self.snapshots and not self.folder:
            raise ConfigError("StateConfig.snapshots are made of state on disk: set StateConfig.folder")
        least_of = {"checkpoint_bytes": 1, "unwritten_bytes": self.checkpoint_bytes, "memory_bytes": 1 << 20}
        least_of |= {"snapshots_kept": 2, "snapshot_bytes_per_second": 0}
        for name, least in least_of.items():
            _count(f"StateConfig.{name}", getattr(self, name), least)


class QueryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Queries between processes. ``secret_file``: its content is the group's secret, of all members and readers.
    ``address``: published for readers, ``https://HOST:PORT``; ``kes run --queries`` fills it in.
    ``tls_certificate_file`` and ``tls_key_file``: of the server; ``tls_ca_file``: what readers check it with (default:
    the system's)."""

    secret_file: str = ""
    address: str = ""
    tls_certificate_file: str = ""
    tls_key_file: str = ""
    tls_ca_file: str = ""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _made_of((str,), f"QueryConfig.{name}", getattr(self, name), "text")


GROUPS = {
    "group": GroupConfig,
    "timeouts": TimeoutConfig,
    "queues": QueueConfig,
    "pool": PoolConfig,
    "state": StateConfig,
    "queries": QueryConfig,
}
"""The groups of settings, by the names that ``EventSourceConfig`` has for them."""


class EventSourceConfig(msgspec.Struct, frozen=True, kw_only=True, metaclass=TakesOutsideSettings):
    """The settings of an event source. Only ``group_id``, ``topic`` and ``num_partitions`` have no default.

    * Where: ``bootstrap_servers`` (else ``KES_BOOTSTRAP_SERVERS``), ``client_settings`` (librdkafka settings: TLS,
      SASL …); ``source_bootstrap_servers`` and ``source_client_settings`` when the source topic lives on another
      cluster than the group, the state and the outputs.
    * Identity: ``group_id``; ``instance_id`` (else ``KES_INSTANCE_ID``, else made up), which names the transactional
      ids and must be unique in the group.
    * Topics: ``topic`` with ``num_partitions``; ``changelog_topic`` and ``dead_letter_topic`` (names made from
      group and topic by default); ``replication_factor`` and ``min_insync_replicas`` for those that are created.
    * Start: ``auto_offset_reset`` is for partitions without any committed offset: ``earliest``, ``latest`` or
      ``error``. With several inputs (``EventSource.input``), ``alignment_seconds`` is how long the others wait for one
      that is not known to be at its end.
    * Loop: with ``loop`` handlers send events to this source itself (``ctx.loop``), over a topic of its own;
      ``max_loop_hops`` bounds how often one leads to the next (0: no bound).
    * Errors: ``decode_policy`` for records that cannot be read or have an unknown type; ``error_policy`` for
      handlers (each handler may have its own).
    * Groups of settings: ``group`` (``GroupConfig``: strategy, membership, moves, standbys), ``timeouts``
      (``TimeoutConfig``), ``queues`` (``QueueConfig``: what waits to be handled), ``pool`` (``PoolConfig``:
      transactions), ``state`` (``StateConfig``: state on disk), ``queries`` (``QueryConfig``: between processes).
    * Callbacks, on the event loop: ``on_partition_activated(partition)``, ``on_partition_revoked(partition)``,
      ``metrics_handler(measurement)``.

    The settings of ``group``, ``timeouts`` and ``queues`` exist here under their own names as well: ``num_standbys=1``
    is ``group=GroupConfig(num_standbys=1)``, and beside a group it replaces that one setting. These flat names are for
    settings written before there were groups; the next release drops them.
    """

    group_id: str
    topic: str
    num_partitions: int
    bootstrap_servers: str = ""
    client_settings: dict[str, Any] = {}
    source_bootstrap_servers: str = ""
    source_client_settings: dict[str, Any] = {}
    instance_id: str = ""
    changelog_topic: str = ""
    dead_letter_topic: str = ""
    replication_factor: int = 1
    min_insync_replicas: int = 1
    auto_offset_reset: str = "earliest"
    alignment_seconds: float = 0.5
    loop: bool = False
    max_loop_hops: int = 100
    decode_policy: Retry = STOP
    error_policy: Retry = STOP
    group: GroupConfig = GroupConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    queues: QueueConfig = QueueConfig()
    pool: PoolConfig = PoolConfig()
    state: StateConfig = StateConfig()
    queries: QueryConfig = QueryConfig()
    on_partition_activated: Callable[[int], None] | None = None
    on_partition_revoked: Callable[[int], None] | None = None
    metrics_handler: MetricsHandler | None = None

    # flat names, for one release
    strategy: str | tuple[str, ...] = flat("group")
    membership: str = flat("group")
    static_membership: bool = flat("group")
    num_standbys: int = flat("group")
    max_moves: int = flat("group")
    max_move_bytes: int = flat("group")
    preparation_timeout_seconds: float = flat("group")
    leave_timeout_seconds: float = flat("group")
    publish_status: bool = flat("group")
    session_timeout_seconds: float = flat("timeouts")
    transaction_timeout_seconds: float = flat("timeouts")
    heartbeat_interval_seconds: float = flat("timeouts")
    rebalance_timeout_seconds: float = flat("timeouts")
    drain_timeout_seconds: float = flat("timeouts")
    call_timeout_seconds: float = flat("timeouts")
    recovery_timeout_seconds: float = flat("timeouts")
    max_queued_records: int = flat("queues")
    max_queued_bytes: int = flat("queues")
    max_queued_bytes_total: int = flat("queues")
    max_poll_records: int = flat("queues")

    def __post_init__(self) -> None:
        for name in ("group_id", "topic", "changelog_topic", "dead_letter_topic", "instance_id"):
            if getattr(self, name) or name in ("group_id", "topic"):
                _check_name(name, getattr(self, name), _INSTANCE if name == "instance_id" else _NAME)
        for name in ("bootstrap_servers", "source_bootstrap_servers"):
            _made_of((str,), name, getattr(self, name), "addresses as text: host:port,host:port")
            without_credentials(name, getattr(self, name))
        _count("num_partitions", self.num_partitions, 1)
        _count("replication_factor", self.replication_factor, 1)
        if not 1 <= self.min_insync_replicas <= self.replication_factor:
            raise ConfigError(
                f"min_insync_replicas is {self.min_insync_replicas}; it must be between 1 and replication_factor "
                f"({self.replication_factor})"
            )
        if self.auto_offset_reset not in ("earliest", "latest", "error"):
            raise ConfigError(f"auto_offset_reset is {self.auto_offset_reset!r}; use 'earliest', 'latest' or 'error'")
        _made_of((bool,), "loop", self.loop, "True or False")
        _count("max_loop_hops", self.max_loop_hops, 0)
        if self.loop and self.source_is_elsewhere:
            raise ConfigError(
                "loop is set beside source_bootstrap_servers: a loop is written and read where the group is, so the "
                "source's topic has to be there, too"
            )
        for name in ("client_settings", "source_client_settings"):
            _made_of((Mapping,), name, getattr(self, name), "a dictionary")
        for name in ("decode_policy", "error_policy"):
            _made_of((Retry,), name, getattr(self, name), "a Retry: STOP, SKIP, DEAD_LETTER, or one of your own")
        for name, kind in GROUPS.items():
            _made_of((kind,), name, getattr(self, name), f"a {kind.__name__}")
        if self.source_client_settings and not self.source_is_elsewhere:
            raise ConfigError(
                "source_client_settings are set without source_bootstrap_servers: name the source's cluster, or use "
                "client_settings"
            )
        for name in (self.changelog, self.dead_letters, self.offsets_topic, *([self.loop_topic] if self.loop else ())):
            if len(name) > MAX_NAME_LENGTH:
                raise ConfigError(
                    f"the topic name {name!r} has {len(name)} characters; Kafka allows {MAX_NAME_LENGTH}: "
                    "set changelog_topic and dead_letter_topic, or shorten group_id"
                )

    def __repr__(self) -> str:
        """Show the names only of the clients' settings: their values may be secrets."""
        fields = msgspec.structs.asdict(self)
        for name in ("client_settings", "source_client_settings"):
            fields[name] = sorted(fields[name])
        return f"EventSourceConfig({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return ``group.strategies``, under its flat name."""
        return self.group.strategies

    @property
    def source_is_elsewhere(self) -> bool:
        """Check that the source topic lives on another cluster."""
        return bool(self.source_bootstrap_servers)

    @property
    def offsets_topic(self) -> str:
        """Return the topic under whose name the group's offsets are committed: the source, or its stand-in."""
        return commit_log_name(self.group_id, self.topic) if self.source_is_elsewhere else self.topic

    @property
    def changelog(self) -> str:
        """Return the name of the changelog topic."""
        return self.changelog_topic or changelog_name(self.group_id, self.topic)

    @property
    def dead_letters(self) -> str:
        """Return the name of the dead-letter topic."""
        return self.dead_letter_topic or dead_letter_name(self.group_id, self.topic)

    @property
    def loop_topic(self) -> str:
        """Return the name of the loop's topic; there is one with ``loop``."""
        return loop_name(self.group_id, self.topic)

    def resolved(self, environment: Mapping[str, str] | None = None) -> EventSourceConfig:
        """Return the same settings with ``bootstrap_servers`` and ``instance_id`` filled in. Raises ``ConfigError``
        without an address."""
        environment = os.environ if environment is None else environment
        servers = bootstrap_servers(self.bootstrap_servers, environment)
        instance = self.instance_id or environment.get(INSTANCE_VARIABLE, "")
        if not instance:
            instance = f"{host_name()}-{uuid.uuid4().hex[:8]}"
        return msgspec.structs.replace(self, bootstrap_servers=servers, instance_id=instance)
