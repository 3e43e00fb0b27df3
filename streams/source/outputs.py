"""Declare the topics that handlers of an event source forward to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from streams.errors import ConfigError, RegistrationError
from streams.formats.cloudevents import CloudEvents
from streams.model.partitioners import NullKeys, Partitioner, PlaceOf, checked
from streams.model.topics import SentTo, TopicSpec
from streams.runtime import source_topics
from streams.sak.numbers import is_whole
from streams.source.registry import Registry


class DeclaredOutputs:
    """The topics that handlers forward to: ``by_topic``, as they must be, in the order of their declarations."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.by_topic: dict[str, TopicSpec] = {}
        self.partitioners: dict[str, PlaceOf] = {}
        """Of the topics whose keys are not placed by murmur2."""
        self._forms: dict[str, CloudEvents] = {}
        self.null_keys: dict[str, NullKeys] = {}
        """Of the topics whose records without a key are not placed by transactions."""

    def declare(
        self,
        topic: str,
        num_partitions: int | None,
        replication_factor: int | None,
        configs: Mapping[str, str] | None,
        partitioner: Partitioner,
        form: CloudEvents | None,
        null_keys: NullKeys = "sticky",
    ) -> str:
        """See ``EventSource.output``."""
        cannot = self.sent_to.unwritable.get(topic, "it needs no declaration as output")
        self._registry.check_declarable("output", topic, cannot)
        if topic in self.by_topic:
            raise RegistrationError(f"the output {topic!r} is declared twice")
        what = f"of source.output({topic!r})"
        for name, value in (("num_partitions", num_partitions), ("replication_factor", replication_factor)):
            if value is not None and (not is_whole(value) or value < 1):
                raise ConfigError(f"{name} {what} is {value!r}; it must be a whole number, 1 or more")
        place_of = checked(partitioner, f"partitioner {what}")
        if form is not None and not getattr(form, "source", ""):
            raise ConfigError(f'form {what} is {form!r}; it must be CloudEvents(source="/..."), which can write')
        if null_keys not in get_args(NullKeys):
            ways = ", ".join(get_args(NullKeys))
            raise ConfigError(f"null_keys {what} is {null_keys!r}; it must be one of {ways}")
        given: Mapping[Any, Any] = configs or {}  # whatever it is
        for name, setting in given.items():
            if not isinstance(name, str) or not isinstance(setting, str):
                raise ConfigError(f"configs {what} has {name!r}: {setting!r}; names and settings are texts, as Kafka's")
        config = self._registry.config
        self.by_topic[topic] = source_topics.spec(config, topic, num_partitions, replication_factor, configs)
        if partitioner != "murmur2":
            self.partitioners[topic] = place_of
        if form is not None:
            self._forms[topic] = form
        if null_keys != "sticky":
            self.null_keys[topic] = null_keys
        return topic

    @property
    def forms(self) -> dict[str, CloudEvents]:
        """The forms of the topics whose events have not our headers; among them the source's own, by its rule."""
        types = self._registry.router.types
        own = {self._registry.config.topic: types} if isinstance(types, CloudEvents) and types.source else {}
        return own | self._forms

    @property
    def sent_to(self) -> SentTo:
        """The topics that records may be sent to: any, if no output is declared. Not to the source's own topic if its
        rule cannot write."""
        config, unwritable = self._registry.config, dict[str, str]()
        types = self._registry.router.types
        if types is not None and config.topic not in self.forms:
            unwritable[config.topic] = (
                f"{config.topic} is the source's own topic, where {types.title} says what a record is; it can write "
                "none: send it by ctx.loop, or to another topic"
            )
        own = source_topics.purposes(config)
        return SentTo(frozenset(self.by_topic) | frozenset(own) if self.by_topic else None, unwritable)
