"""Declarations of an event source, apart from what runs: settings, store, handlers, inputs, outputs, lookups, visits.

A run reads it, and so do replays, ``TestDriver`` and the drawing of a topology. Its parts are what the declaring
methods of ``EventSource`` write to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from streams.core.cron import CronSchedule
from streams.core.router import Route, check_callable
from streams.errors import ConfigError, RegistrationError
from streams.formats.needs import own_needs
from streams.formats.rules import TypeRule
from streams.metrics import MetricsHandler
from streams.model.topology import Topology, TopologyHandler, TopologyTopic
from streams.outcomes import Retry, adapted, function_names, parks
from streams.protocols import StateStore
from streams.records import DEFAULT_MESSAGE_LIMIT, PartitionChange, TopicPartition
from streams.runtime import source_topics
from streams.runtime.async_work.concurrent_stage import ConcurrentStageDefinition
from streams.runtime.partition.joined_rows import ROUTE_PREFIX
from streams.runtime.partition.joining import keep_row
from streams.runtime.partition.visiting import requested
from streams.sak.users_code import calling_location
from streams.settings.config import EventSourceConfig
from streams.settings.groups import check_type
from streams.source.aggregates import AggregateRules
from streams.source.inputs import DeclaredInputs
from streams.source.joins import DeclaredJoins
from streams.source.lookups import DeclaredLookups
from streams.source.outputs import DeclaredOutputs
from streams.source.registering import DeclaredHandlers
from streams.source.registry import Registry
from streams.source.visits import DeclaredVisits
from streams.stores.stateless import Stateless

if TYPE_CHECKING:  # a source is declared without the engine
    from streams.runtime.replay import Program

CallbackT = TypeVar("CallbackT", bound=Callable[[Any, PartitionChange], object])
S = TypeVar("S")
StoreFactory = Callable[[TopicPartition], Any]
_UNMUTED: Final = (source_topics.TABLE, source_topics.LOOKUP, source_topics.LOOP, source_topics.VISITS)
Lifespan = Callable[[], AbstractAsyncContextManager[Any]]


class Declarations:
    """The declarations of one event source. ``store``: its factory; ``None``: it is stateless. ``types``: the rule of
    its own topic.

    ``lifespans``: contexts of a run, in the order in which they are entered. ``metrics_handlers``: called with each
    measurement, beside that of the settings. Raises ``ConfigError``, ``RegistrationError``.
    """

    def __init__(self, config: EventSourceConfig, store: StoreFactory | None, types: TypeRule | None = None) -> None:
        check_type((EventSourceConfig,), "the config of the event source", config, "an EventSourceConfig")
        if store is not None:
            _check_store(store)
        self._store = store
        self._registry: Final = Registry(config, has_store=store is not None)
        self.router: Final = self._registry.router
        self.handlers: Final = DeclaredHandlers(self._registry)
        self.inputs: Final = DeclaredInputs(self._registry, types)
        self.joins: Final = DeclaredJoins(self._registry, self.inputs.by_topic)
        self.outputs: Final = DeclaredOutputs(self._registry)
        self.lookups: Final = DeclaredLookups(self._registry)
        self.visits: Final = DeclaredVisits(self._registry)
        self.lifespans: list[Lifespan] = []
        self.metrics_handlers: list[MetricsHandler] = []
        self.aggregate: AggregateRules[Any] | None = None
        self.callbacks: dict[str, list[Callable[[Any, PartitionChange], object]]] = {}

    @property
    def config(self) -> EventSourceConfig:
        """Return the settings."""
        return self._registry.config

    @config.setter
    def config(self, config: EventSourceConfig) -> None:
        self._registry.config = config

    @property
    def store_factory(self) -> StoreFactory:
        """Return the factory of stores; a stateless source has a store that is empty."""
        return self._store or Stateless

    def copy(self) -> Declarations:
        """Return the same declarations, open to changes: neither those of the copy nor later ones here reach the
        other."""
        made = Declarations(self.config, self._store, self.inputs.types)
        made.router.routes, made.router.default = dict(self.router.routes), self.router.default
        made.router.own_metrics = dict(self.router.own_metrics)
        made.router.tracer, made.router.visits = self.router.tracer, dict(self.router.visits)
        made.router.jobs = dict(self.router.jobs or {})
        made.handlers.schedules[:] = self.handlers.schedules
        # The copy was made with its own inputs; those of the original have them, too, in the order that counts.
        made.inputs.by_topic.clear()
        made.inputs.by_topic.update(self.inputs.by_topic)
        made.outputs.by_topic.update(self.outputs.by_topic)
        made.outputs.partitioners.update(self.outputs.partitioners)
        made.outputs._forms.update(self.outputs._forms)
        made.outputs.null_keys.update(self.outputs.null_keys)
        made.lookups.by_topic.update(self.lookups.by_topic)
        made.aggregate = self.aggregate
        made.lifespans, made.metrics_handlers = [*self.lifespans], [*self.metrics_handlers]
        made.callbacks = {moment: [*functions] for moment, functions in self.callbacks.items()}
        return made

    def declare_aggregate(
        self, initial: S, events: str, remember: timedelta, on_error: Retry | None
    ) -> AggregateRules[S]:
        """See ``EventSource.aggregate``."""
        self.router.refuse_if_frozen("the aggregate")
        if self.aggregate is not None:
            raise RegistrationError("the source has an aggregate already; it has one store, and so one kind of state")
        declared = AggregateRules(self.handlers, self.router, initial, events, remember, on_error)
        self.aggregate = declared
        return declared

    def add_callback(self, moment: str, function: CallbackT) -> CallbackT:
        """Have a function called when a partition comes or goes. Raises ``RegistrationError`` for one that cannot be,
        and after the start."""
        check_callable(f"the function of {moment}", function, "source", "change")
        self.router.refuse_if_frozen(f"the function of {moment}")
        self.callbacks.setdefault(moment, []).append(function)
        return function

    def wrap_handlers(self, wrap: Callable[[Route], Route]) -> None:
        """Replace the route of each handler."""
        router = self.router
        wrapped = {route: wrap(route) for route in router.each}
        router.routes = {name: wrapped[route] for name, route in router.routes.items()}
        router.default = None if router.default is None else wrap(router.default)
        router.visits = {name: (wrap(route), table) for name, (route, table) in router.visits.items()}
        self.handlers.schedules[:] = [(schedule, wrap(route)) for schedule, route in self.handlers.schedules]

    def refuse_muted(self) -> None:
        """Raise ``ConfigError`` for what a muted source cannot have: calls outside would be made by both sources, and
        only its author knows whether that is harmless; and what is read or sent by the source itself."""
        found = [
            f"the {topic.purpose} topic {topic.name}" for topic in self.topology.topics if topic.purpose in _UNMUTED
        ]
        found += [f"the scheduled interjection {name}" for name in self.topology.interjections]
        found += [f"the jobs {name}" for name in self.router.jobs or ()]
        found += [
            f"the {handler.kind} handler of {handler.event}"
            for handler in self.topology.handlers
            if handler.kind not in ("plain", "async", "blocking", "batch")
        ]
        if found:
            raise ConfigError(f"a source that is muted (shadow_of) cannot have {', '.join(found)}")

    def freeze(self) -> None:
        """Check what can only be checked when all is declared, and refuse further declarations: the source starts.
        Raises ``RegistrationError``, ``ConfigError``."""
        if self.config.shadow_of:
            self.refuse_muted()
        from streams.runtime.ownership.replicas import make_store  # with the engine, which a declaration does without

        self.inputs.check()
        # What a handler forwards to is known at its event only; an aggregate has named its topic.
        if self.aggregate is not None and (why := self.outputs.sent_to.refusal(self.aggregate.topic)):
            raise RegistrationError(f"the events of the aggregate cannot be sent: {why}")
        self._check_rows()
        self.visits.check(lambda: make_store(self.store_factory, TopicPartition(self.config.topic, 0)))
        self.router.forms = self.outputs.forms
        self.router.freeze()

    def _check_rows(self) -> None:
        for topic, spec in self.inputs.by_topic.items():
            policy = self.config.decode_policy if spec.on_error is None else spec.on_error
            if spec.table is None:
                continue
            if not isinstance(policy, Retry):  # what it answers is known at run time only
                self.inputs.by_topic[topic] = msgspec.structs.replace(spec, on_error=adapted(policy, _of_row))
            if parks(policy):
                raise RegistrationError(
                    f"a row of the joined table {spec.topic!r} that cannot be read would be parked (PARK, or "
                    "waits='key'), and the table would differ from its topic meanwhile: give source.join a policy of "
                    "its own (on_error=STOP, SKIP, DEAD_LETTER)"
                )

    def schema_needs(self) -> list[Any]:
        """Return the rules and codecs that ask a schema registry before a start."""
        rules = [spec.types for spec in self.inputs.specs.values()]
        return own_needs(rules, self.router.routes.keys(), self.outputs.by_topic)

    @property
    def topology(self) -> Topology:
        """Return what the source reads, handles, keeps and sends."""
        config, router = self.config, self.router
        purposes = source_topics.purposes(config)
        topics = [
            TopologyTopic(spec.name, purposes[spec.name], spec.partitions, self._deciding(spec.name))
            for spec in source_topics.specs(config)
        ]
        topics += [
            TopologyTopic(name, source_topics.purpose_of_input(spec), config.num_partitions, self._deciding(name))
            for name, spec in self.inputs.by_topic.items()
            if not spec.is_own
        ]
        topics += [TopologyTopic(name, source_topics.LOOKUP, 0) for name in self.lookups.by_topic]
        topics += [
            TopologyTopic(spec.name, source_topics.OUTPUT, spec.partitions) for spec in self.outputs.by_topic.values()
        ]
        default = [] if router.default is None else [router.default]
        routes = [*router.each, *default, *(route for route, _ in router.visits.values())]
        # Without those of the toolkit itself, which handle rows of joined tables and requests for visits.
        handlers = tuple(_shown(route) for route in routes if route.handler not in (keep_row, requested))
        crons = {route.name: each.title for each, route in self.handlers.schedules if isinstance(each, CronSchedule)}
        has_store = self._store is not None
        return Topology(config.group_id, tuple(topics), handlers, self._interjections(), has_store, crons)

    def program(self) -> Program:
        """Return what a replay elsewhere needs. Addresses, credentials and callbacks are left out."""
        from streams.runtime.replay import Program

        config, router = self.config, self.router
        bare = msgspec.structs.replace(
            config,
            bootstrap_servers="",
            client_settings={},
            source_bootstrap_servers="",
            source_client_settings={},
            on_partition_activated=None,
            on_partition_revoked=None,
            metrics_handler=None,
            shadow_of="",
        )
        return Program(
            bare,
            router.each,
            router.default,
            self.store_factory,
            self._interjections(),
            message_limit=int(config.client_settings.get("message.max.bytes", DEFAULT_MESSAGE_LIMIT)),
            inputs=tuple(self.inputs.by_topic),
            lookups=tuple(self.lookups.by_topic),
            types=self.router.types,
            forms=self.outputs.forms,
            own_metrics=dict(self.router.own_metrics),
        )

    def _deciding(self, topic: str) -> tuple[str, ...]:
        """Return the policy functions for records of an input that cannot be read; of other topics there are none."""
        spec = self.inputs.specs.get(topic)
        if spec is None and topic != self.config.topic:
            return ()
        types = None if spec is None else spec.types
        own = () if spec is None else (spec.nulls, spec.on_error)
        of_rule = () if types is None else (types.on_null, types.on_missing)
        return function_names(*own, *of_rule, self.config.decode_policy)

    def _interjections(self) -> tuple[str, ...]:
        return tuple(route.name for _, route in self.handlers.schedules)


def _of_row(policy: Retry) -> Retry:
    """Refuse an answer about a row of a joined table. Raises ``RegistrationError``."""
    if policy.parks:
        raise RegistrationError("a row of a joined table cannot be parked: the table would differ from its topic")
    return policy


def _check_store(store: object) -> None:
    what = "the store, which is to be a factory such as Table.factory(...),"
    check_callable(what, store, "topic_partition")
    if isinstance(store, type) and not issubclass(store, StateStore):
        raise RegistrationError(f"{what} is the class {store.__qualname__}{calling_location()}, which is no store")


def _shown(route: Route) -> TopologyHandler:
    """Describe a route for the topology."""
    if route.ahead is not None:
        stage = route.ahead.stage
        kind = "concurrent" if isinstance(stage, ConcurrentStageDefinition) else stage.name
    elif route.kind is not None:
        kind = route.kind.name
    else:
        kind = "blocking" if route.is_blocking else "async" if route.is_async else "plain"
    deciding = function_names(route.policy, route.decode_policy)
    return TopologyHandler(route.name.removeprefix(ROUTE_PREFIX), route.handler_name, kind, deciding)
