"""Declare joined tables of an event source, and the handlers of their updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Generic, TypeVar, get_args

from streams.codecs import codec_for
from streams.core.router import Route, Router, check_callable
from streams.errors import ConfigError, RegistrationError
from streams.model.topics import InputSpec
from streams.outcomes import ExecutionState, Retry
from streams.protocols import Codec, DiskEngine
from streams.records import TYPE_HEADER
from streams.runtime import source_topics
from streams.runtime.partition.event_context import EventContext
from streams.runtime.partition.joined_rows import ROUTE_PREFIX
from streams.runtime.partition.joining import JoinKind, keep_row, with_update
from streams.settings.config import EventSourceConfig
from streams.stores.joined import Joined, Partitioner, Update

StoreT = TypeVar("StoreT")
K = TypeVar("K")
V = TypeVar("V")
UpdateHandler = Callable[[EventContext[StoreT], Update[K, V]], ExecutionState | None]


class JoinDeclarations(Generic[StoreT]):
    """The part of ``EventSource`` about joined tables."""

    config: EventSourceConfig
    _router: Router
    _inputs: dict[str, InputSpec]

    def join(
        self,
        topic: str,
        *,
        key: type[K],
        value: type[V],
        ordered: bool = False,
        key_codec: Codec[K] | None = None,
        value_codec: Codec[V] | None = None,
        partitioner: Partitioner | None = "murmur2",
        engine: DiskEngine | None = None,
        on_error: Retry | None = None,
    ) -> Joined[K, V]:
        """Join a table: a compacted topic whose last record of each key is a row. Returns its declaration, for
        ``ctx.joined(table)``.

        Partition p of the source has the rows in partition p of the topic: so the number of partitions is the same, and
        rows are placed as the keys of the source are, by ``partitioner`` (``murmur2``; ``crc32``: librdkafka's default;
        ``fnv1a``: goka's; ``None``: it is not checked). A table is read up to its end before the first event that finds
        it new; later its records have their place among the events by time, as those of ``input``. A row changes in the
        transaction that moves the position in the table, and is kept in the changelog.

        ``ordered``, ``key_codec``, ``value_codec``: see ``Table.factory``. ``engine`` (``SQLite()``, ``RocksDB()``)
        keeps the rows on disk, in the database of the store, which has the same engine; the table is ordered then, if
        the key's codec preserves order. ``on_error``: the error policy of records without key, or that cannot be read,
        or are too large for the changelog (default: ``decode_policy``); the row before stays. A record without a value
        deletes the row. Raises ``ConfigError``; ``RegistrationError`` after the start, and for a second declaration.
        """
        what = f"source.join({topic!r})"
        source_topics.check_declarable(self._router, self.config, "join", topic, "it cannot be a joined table")
        if topic in self._inputs:
            raise RegistrationError(f"the topic {topic!r} is declared twice: it is one input, or one joined table")
        if self.config.source_is_elsewhere:
            raise ConfigError(
                f"{what}: the source's topic is on another cluster (source_bootstrap_servers); joined tables are where "
                "the group is, with all inputs"
            )
        names = get_args(Partitioner)
        if partitioner is not None and partitioner not in names:
            raise ConfigError(
                f"partitioner of {what} is {partitioner!r}; it must be one of {', '.join(names)}, or None"
            )
        if on_error is not None and not isinstance(on_error, Retry):
            raise ConfigError(f"on_error of {what} is {on_error!r}; it must be an error policy, such as SKIP")
        if engine is not None and not hasattr(engine, "open"):
            raise ConfigError(f"engine of {what} is {engine!r}; it must be a kind of database, such as SQLite()")
        keys = codec_for(key) if key_codec is None else key_codec
        values = codec_for(value) if value_codec is None else value_codec
        if ordered and not getattr(keys, "order_preserving", False):
            raise ConfigError(f"{what}, ordered=True: {type(keys).__name__} of {key!r} does not keep keys in order")
        partitions = self.config.num_partitions
        table = Joined(
            topic, (keys, values), partitions=partitions, ordered=ordered, partitioner=partitioner, engine=engine
        )
        name, policy = f"{ROUTE_PREFIX}{topic}", self.config.error_policy
        self._router.add(Route(name, None, keep_row, blocking=False, policy=policy, kind=JoinKind(topic)))
        self._inputs[topic] = InputSpec(topic, ((TYPE_HEADER, name.encode()),), None, on_error, table)
        return table

    def register_update(
        self,
        table: Joined[K, V],
        handler: UpdateHandler[StoreT, K, V] | None = None,
        /,
        *,
        on_error: Retry | None = None,
    ) -> Callable[[UpdateHandler[StoreT, K, V]], UpdateHandler[StoreT, K, V]]:
        """Register the handler of a joined table's updates, as a decorator or with the handler as second argument.

        It is a plain function of ``(ctx, update)``, with ``update.key``, ``update.old`` and ``update.new``, and is
        called once for each record of the table, in the transaction that changes the row. ``ctx.joined(table)`` has the
        new row already. If it fails for good, ``on_error`` (default: ``config.error_policy``) decides about its
        effects; the row is changed all the same. Raises ``RegistrationError``.
        """
        spec = self._inputs.get(table.topic)
        if spec is None or spec.table is not table:
            raise RegistrationError(f"{table!r} is no joined table of this source; source.join(...) makes one")
        what = f"the update handler of {table.topic}"

        def register(function: UpdateHandler[StoreT, K, V]) -> UpdateHandler[StoreT, K, V]:
            if self._router.is_frozen:
                raise RegistrationError(f"{what} comes too late: register before the event source is started")
            check_callable(what, function, "ctx", "update")
            if inspect.iscoroutinefunction(function):
                raise RegistrationError(f"{what} is async; it is a plain function: {JoinKind.instead}")
            name = f"{ROUTE_PREFIX}{table.topic}"
            if self._router.routes[name.encode()].handler is not keep_row:
                raise RegistrationError(f"the joined table {table.topic!r} has an update handler already")
            kind, policy = JoinKind(table.topic, has_handler=True), on_error or self.config.error_policy
            made = Route(name, None, with_update(function), blocking=False, policy=policy, kind=kind)
            self._router.routes[name.encode()] = made
            return function

        if handler is not None:
            register(handler)
        return register
