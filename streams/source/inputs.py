"""Declare further inputs of an event source."""

from __future__ import annotations

from streams.core.router import Route
from streams.core.visits import VisitRequest
from streams.errors import ConfigError, RegistrationError
from streams.events import event_type_of
from streams.formats.rules import Deleted, Only, TypeRule
from streams.model.topics import InputSpec, TopicSpec, specs_of
from streams.outcomes import POLICIES, ErrorPolicy, Retry, is_policy, unparked
from streams.records import IncomingRecord
from streams.runtime import source_topics
from streams.runtime.partition.visiting import requested
from streams.source.registry import Registry


class DeclaredInputs:
    """The topics that a source reads beside its own one: ``by_topic``, in the order of their declarations."""

    def __init__(self, registry: Registry, types: TypeRule | None) -> None:
        check_rule("the event source", types)
        self._registry = registry
        self.types = registry.router.types = types
        config = registry.config
        if config.visits:
            event_type = event_type_of(VisitRequest)
            registry.router.add(
                Route(event_type.name, event_type, requested, blocking=False, policy=unparked(config.error_policy))
            )
        # Of its own inputs only the loop is waited for: no event is the worse for a visit's request that comes later.
        awaited = config.loop_topic
        policy = config.decode_policy
        on_error = None if isinstance(policy, Retry) and not policy.parks else unparked(policy)
        self.by_topic: dict[str, InputSpec] = {
            topic: InputSpec(topic, is_own=True, is_awaited=True)
            if topic == awaited
            else InputSpec(topic, on_error=on_error, is_own=True, is_awaited=False)
            for topic in config.own_inputs
        }

    def declare(
        self, topic: str, event: type[object] | None, nulls: ErrorPolicy | type[Deleted] | None, types: TypeRule | None
    ) -> str:
        """See ``EventSource.input``."""
        self._registry.check_declarable("input", topic, "it cannot be a further input")
        if topic in self.by_topic:
            raise RegistrationError(f"the input {topic!r} is declared twice")
        if self._registry.config.source_is_elsewhere:
            raise ConfigError(
                f"source.input({topic!r}): the source's topic is on another cluster (source_bootstrap_servers); a "
                "source with several inputs has all of them where its group is"
            )
        if nulls is not None and not is_policy(nulls) and (nulls is not Deleted or event is None):
            raise ConfigError(
                f"nulls of source.input({topic!r}) is {nulls!r}; it must be an error policy: {POLICIES} (Deleted: with "
                "event=, or in the rule of types=)"
            )
        check_rule(f"source.input({topic!r})", types)
        if event is not None and types is not None:
            raise ConfigError(f"source.input({topic!r}) has both event= and types=; event=X is types=Only(X)")
        if event is not None:
            types, nulls = Only(event, nulls=nulls), None
        self.by_topic[topic] = InputSpec(topic, types, None if isinstance(nulls, type) else nulls)
        return topic

    @property
    def specs(self) -> dict[str, InputSpec]:
        """The further inputs by topic, with the source's own one if it has a rule of types."""
        return specs_of(self._registry.config.topic, self._registry.router.types, self.by_topic.values())

    def received(self, topic: str, records: list[IncomingRecord]) -> list[IncomingRecord]:
        """Return records of an input as its handlers have them."""
        spec = self.specs.get(topic)
        return records if spec is None else spec.received(records)

    def topics(self) -> list[TopicSpec]:
        """Return the declared inputs as they must be; the source's own are among ``source_topics.specs``."""
        config = self._registry.config
        return [source_topics.spec_of_input(config, spec) for spec in self.by_topic.values() if not spec.is_own]

    def check(self) -> None:
        """Check that the events that rules give have a handler. Raises ``RegistrationError``."""
        router = self._registry.router
        for spec in self.specs.values():
            for name in () if spec.types is None else spec.types.names:
                if name.encode() not in router.routes and router.default is None:
                    raise RegistrationError(
                        f"{spec.types} says which records of {spec.topic!r} are {name!r}, which has no handler: "
                        "register one"
                    )


def check_rule(what: str, types: object) -> None:
    """Raise ``ConfigError`` for what is no rule of types."""
    if types is not None and not isinstance(types, TypeRule):
        raise ConfigError(
            f"types of {what} is {types!r}; it must be a rule of streams.formats, such as Only(Click) or CloudEvents()"
        )
