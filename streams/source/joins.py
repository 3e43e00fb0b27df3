"""Declare joined tables of an event source, and the handlers of their updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from streams.codecs import codec_for
from streams.core.router import Route, check_callable
from streams.errors import ConfigError, RegistrationError
from streams.formats.rules import Always
from streams.model.partitioners import PartitionerName
from streams.model.topics import InputSpec
from streams.outcomes import POLICIES, ErrorPolicy, is_policy
from streams.protocols import Codec, DiskEngine
from streams.records import TYPE_HEADER
from streams.runtime.partition.joined_rows import ROUTE_PREFIX
from streams.runtime.partition.joining import JoinKind, keep_row, with_update
from streams.source.registry import Registry
from streams.stores.joined import Joined

K = TypeVar("K")
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., Any])


class DeclaredJoins:
    """The joined tables of a source: each is an input whose records change rows."""

    def __init__(self, registry: Registry, inputs: dict[str, InputSpec]) -> None:
        self._registry = registry
        self._inputs = inputs

    def declare(
        self,
        topic: str,
        types: tuple[type[K], type[V]],
        codecs: tuple[Codec[K] | None, Codec[V] | None],
        *,
        ordered: bool,
        partitioner: PartitionerName | None,
        engine: DiskEngine | None,
        on_error: ErrorPolicy | None,
    ) -> Joined[K, V]:
        """See ``EventSource.join``."""
        what = f"source.join({topic!r})"
        self._registry.check_declarable("join", topic, "it cannot be a joined table")
        if topic in self._inputs:
            raise RegistrationError(f"the topic {topic!r} is declared twice: it is one input, or one joined table")
        if self._registry.config.source_is_elsewhere:
            raise ConfigError(
                f"{what}: the source's topic is on another cluster (source_bootstrap_servers); joined tables are where "
                "the group is, with all inputs"
            )
        names = get_args(PartitionerName)
        if partitioner is not None and partitioner not in names:
            raise ConfigError(
                f"partitioner of {what} is {partitioner!r}; it must be one of {', '.join(names)}, or None"
            )
        if on_error is not None and not is_policy(on_error):
            raise ConfigError(f"on_error of {what} is {on_error!r}; it must be an error policy: {POLICIES}")
        if engine is not None and not hasattr(engine, "open"):
            raise ConfigError(f"engine of {what} is {engine!r}; it must be a kind of database, such as SQLite()")
        (key, value), (key_codec, value_codec) = types, codecs
        keys = codec_for(key) if key_codec is None else key_codec
        values = codec_for(value) if value_codec is None else value_codec
        if ordered and not getattr(keys, "order_preserving", False):
            raise ConfigError(f"{what}, ordered=True: {type(keys).__name__} of {key!r} does not keep keys in order")
        partitions = self._registry.config.num_partitions
        table = Joined(
            topic, (keys, values), partitions=partitions, ordered=ordered, partitioner=partitioner, engine=engine
        )
        name, policy = f"{ROUTE_PREFIX}{topic}", self._registry.config.error_policy
        # A handler for its records from the start: without one for updates they change rows and nothing else.
        self._registry.router.add(Route(name, None, keep_row, blocking=False, policy=policy, kind=JoinKind(topic)))
        rule = Always(f"the rows of {topic}", ((TYPE_HEADER, name.encode()),))
        self._inputs[topic] = InputSpec(topic, rule, None, on_error, table)
        return table

    def register_update(
        self, table: Joined[Any, Any], handler: F | None, on_error: ErrorPolicy | None
    ) -> Callable[[F], F]:
        """See ``EventSource.register_update``."""
        spec = self._inputs.get(table.topic)
        if spec is None or spec.table is not table:
            raise RegistrationError(f"{table!r} is no joined table of this source; source.join(...) makes one")
        what = f"the update handler of {table.topic}"

        def register(function: F) -> F:
            if self._registry.router.is_frozen:
                raise RegistrationError(f"{what} comes too late: register before the event source is started")
            check_callable(what, function, "ctx", "update")
            if inspect.iscoroutinefunction(function):
                raise RegistrationError(f"{what} is async; it is a plain function: {JoinKind.instead}")
            name = f"{ROUTE_PREFIX}{table.topic}"
            if self._registry.router.routes[name.encode()].handler is not keep_row:
                raise RegistrationError(f"the joined table {table.topic!r} has an update handler already")
            kind, policy = JoinKind(table.topic, has_handler=True), self._registry.policy(on_error)
            made = Route(name, None, with_update(function), blocking=False, policy=policy, kind=kind)
            self._registry.router.routes[name.encode()] = made
            return function

        if handler is not None:
            register(handler)
        return register
