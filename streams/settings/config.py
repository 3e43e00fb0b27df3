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
from streams.model.places import Places, places_of
from streams.model.topics import (
    MAX_NAME_LENGTH,
    changelog_name,
    commit_log_name,
    dead_letter_name,
    loop_name,
    visits_name,
)
from streams.outcomes import POLICIES, STOP, ErrorPolicy, is_policy
from streams.sak.numbers import is_number
from streams.settings.groups import (
    GROUPS,
    NAME,
    GroupConfig,
    ParkingConfig,
    PoolConfig,
    QueryConfig,
    QueueConfig,
    StateConfig,
    TimeoutConfig,
    check_count,
    check_name,
    check_type,
)
from streams.settings.sources import TakesOutsideSettings, bootstrap_servers, without_credentials

INSTANCE_VARIABLE = "KES_INSTANCE_ID"
"""Environment variable with this process's stable name, if the settings have none (``kes run`` sets it)."""

_INSTANCE = re.compile(r"[A-Za-z0-9_-]+")
"""The characters of an instance name. No dot: a transactional id is ``<group>.<instance>.<slot>``, and taken apart."""


def host_name() -> str:
    """Return this machine's name, as a part of instance names: dots and the like become dashes."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64]


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
      ``error``. ``start_at`` is more exact, for a source that has never run: a time with its zone, ``earliest``,
      ``latest``, and ``[TOPIC:]PARTITION@OFFSET`` for single partitions, separated by commas. With several inputs
      (``EventSource.input``), ``alignment_seconds`` is the time that the others wait for one that is not known to be
      at its end.
    * Muted: ``shadow_of`` is the group of a running source that this one follows, and is built again beside. It sends
      nothing, and is never further than that one. ``kes rebuild start`` has to say so, too.
    * Loop: with ``loop`` handlers send events to this source itself (``ctx.loop``), over a topic of its own;
      ``max_loop_hops`` is the number of them that may lead to one another (0: no bound).
    * Visits: with ``visits`` the source has a topic for the requests to visit the keys of its store
      (``EventSource.register_visit``).
    * Errors: ``decode_policy`` for records that cannot be read or have an unknown type; ``error_policy`` for
      handlers (each handler may have its own). ``max_time_jump_seconds`` is the time by which an event may be ahead of
      both the member's clock and the partition's time; beyond, it is a ``TimeJump``, which meets its error policy (0:
      no bound).
    * Groups of settings: ``group`` (``GroupConfig``: strategy, membership, moves, standbys), ``timeouts``
      (``TimeoutConfig``), ``queues`` (``QueueConfig``: what waits to be handled), ``pool`` (``PoolConfig``:
      transactions), ``state`` (``StateConfig``: state on disk), ``queries`` (``QueryConfig``: between processes),
      ``parking`` (``ParkingConfig``: parked keys).
    * Callbacks, on the event loop: ``on_partition_activated(partition)``, ``on_partition_revoked(partition)``,
      ``metrics_handler(measurement)``.
    """

    group_id: str
    topic: str
    num_partitions: int
    bootstrap_servers: str = ""
    client_settings: dict[str, Any] = {}
    source_bootstrap_servers: str = ""
    source_client_settings: dict[str, Any] = {}
    instance_id: str = ""  # one that is made up is another one after a restart
    changelog_topic: str = ""
    dead_letter_topic: str = ""
    replication_factor: int = 1  # works on one broker; 3, with 2 in sync, is for where it matters
    min_insync_replicas: int = 1
    auto_offset_reset: str = "earliest"  # not Kafka's default, "latest", which passes over what was there before
    start_at: str = ""
    shadow_of: str = ""
    alignment_seconds: float = 0.5
    loop: bool = False
    max_loop_hops: int = 100  # a chain that never ends stops with an error that names it
    visits: bool = False
    decode_policy: ErrorPolicy = STOP
    error_policy: ErrorPolicy = STOP
    max_time_jump_seconds: float = 86_400.0  # microseconds taken for milliseconds are thousands of years ahead
    group: GroupConfig = GroupConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    queues: QueueConfig = QueueConfig()
    pool: PoolConfig = PoolConfig()
    state: StateConfig = StateConfig()
    queries: QueryConfig = QueryConfig()
    parking: ParkingConfig = ParkingConfig()
    on_partition_activated: Callable[[int], None] | None = None
    on_partition_revoked: Callable[[int], None] | None = None
    metrics_handler: MetricsHandler | None = None

    def __post_init__(self) -> None:
        for name in ("group_id", "topic", "changelog_topic", "dead_letter_topic", "instance_id", "shadow_of"):
            if getattr(self, name) or name in ("group_id", "topic"):
                check_name(name, getattr(self, name), _INSTANCE if name == "instance_id" else NAME)
        for name in ("bootstrap_servers", "source_bootstrap_servers"):
            check_type((str,), name, getattr(self, name), "addresses as text: host:port,host:port")
            without_credentials(name, getattr(self, name))
        check_count("num_partitions", self.num_partitions, 1)
        check_count("replication_factor", self.replication_factor, 1)
        if not 1 <= self.min_insync_replicas <= self.replication_factor:
            raise ConfigError(
                f"min_insync_replicas is {self.min_insync_replicas}; it must be between 1 and replication_factor "
                f"({self.replication_factor})"
            )
        if self.auto_offset_reset not in ("earliest", "latest", "error"):
            raise ConfigError(f"auto_offset_reset is {self.auto_offset_reset!r}; use 'earliest', 'latest' or 'error'")
        self._check_start_at()
        self._check_shadow()
        check_type((bool,), "loop", self.loop, "True or False")
        check_type((bool,), "visits", self.visits, "True or False")
        check_count("max_loop_hops", self.max_loop_hops, 0)
        for name, topic in (("loop", "a loop is"), ("visits", "requests for visits are")):
            if getattr(self, name) and self.source_is_elsewhere:
                raise ConfigError(
                    f"{name} is set beside source_bootstrap_servers: {topic} written and read where the group is, so "
                    "the source's topic has to be there, too"
                )
        for name in ("client_settings", "source_client_settings"):
            check_type((Mapping,), name, getattr(self, name), "a dictionary")
        for name in ("decode_policy", "error_policy"):
            if not is_policy(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be an error policy: {POLICIES}")
        if not is_number(self.max_time_jump_seconds) or not 0 <= self.max_time_jump_seconds < 1e12:
            raise ConfigError(
                f"max_time_jump_seconds is {self.max_time_jump_seconds!r}; give seconds, or 0 for no bound"
            )
        for name, kind in GROUPS.items():
            check_type((kind,), name, getattr(self, name), f"a {kind.__name__}")
        if self.source_client_settings and not self.source_is_elsewhere:
            raise ConfigError(
                "source_client_settings are set without source_bootstrap_servers: name the source's cluster, or use "
                "client_settings"
            )
        for name in (self.changelog, self.dead_letters, self.offsets_topic, *self.own_inputs):
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

    def _check_start_at(self) -> None:
        check_type((str,), "start_at", self.start_at, "places as text, such as '2026-11-20T00:00Z' or '0@17, 1@20'")
        try:
            places = self.start_places
        except ValueError as error:
            raise ConfigError(f"start_at: {error}") from None
        for (topic, number), _ in places.offsets.items():
            if number >= self.num_partitions:
                raise ConfigError(f"start_at: {topic or self.topic} has the partitions 0 to {self.num_partitions - 1}")

    def _check_shadow(self) -> None:
        if not self.shadow_of:
            return
        if self.shadow_of == self.group_id:
            raise ConfigError(f"shadow_of is {self.shadow_of!r}, the group_id itself: a source cannot follow itself")
        for name in ("loop", "visits", "start_at", "source_bootstrap_servers"):
            if getattr(self, name):
                raise ConfigError(f"{name} is set beside shadow_of: a muted source cannot have it")

    @property
    def start_places(self) -> Places:
        """Return ``start_at`` as places; empty: there are none."""
        return places_of((found for text in self.start_at.split(",") if (found := text.strip())), self.topic)

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

    @property
    def visits_topic(self) -> str:
        """Return the name of the topic of requests for visits; there is one with ``visits``."""
        return visits_name(self.group_id, self.topic)

    @property
    def own_inputs(self) -> tuple[str, ...]:
        """Return the inputs that are the source's own beside ``topic``, in the order in which they come first: the
        requests for visits, its loop."""
        loop = (self.loop_topic,) if self.loop else ()
        return (self.visits_topic, *loop) if self.visits else loop

    def resolved(self, environment: Mapping[str, str] | None = None) -> EventSourceConfig:
        """Return the same settings with ``bootstrap_servers`` and ``instance_id`` filled in. Raises ``ConfigError``
        without an address."""
        environment = os.environ if environment is None else environment
        servers = bootstrap_servers(self.bootstrap_servers, environment)
        instance = self.instance_id or environment.get(INSTANCE_VARIABLE, "")
        if not instance:
            instance = f"{host_name()}-{uuid.uuid4().hex[:8]}"
        return msgspec.structs.replace(self, bootstrap_servers=servers, instance_id=instance)
