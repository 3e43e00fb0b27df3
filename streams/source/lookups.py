"""Declare lookups of an event source: whole topics as tables, beside the events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from streams.errors import ConfigError, RegistrationError
from streams.model.shortcuts import encoder_of
from streams.model.topics import TopicSpec
from streams.records import Record
from streams.runtime import source_topics
from streams.runtime.reading.view_follower import OnError
from streams.sak.numbers import is_number
from streams.source.registry import Registry
from streams.views.global_table import GlobalTable
from streams.views.topic_reader import checked_on_error

K = TypeVar("K")
V = TypeVar("V")


class Lookup(Generic[K, V]):
    """A lookup, as ``source.lookup`` declares it. Its rows are in ``ctx.lookup(table)``.

    ``on_error``, ``timeout_seconds``, ``may_be_made_anew``: see there. ``codecs``: of keys and values.
    """

    def __init__(
        self,
        topic: str,
        make: Callable[[], GlobalTable[K, V]],
        on_error: OnError,
        timeout_seconds: float,
        may_be_made_anew: bool,
    ) -> None:
        self.topic = topic
        self.on_error = on_error
        self.timeout_seconds = timeout_seconds
        self.may_be_made_anew = may_be_made_anew
        self._make = make
        self.codecs = make().codecs  # which refuses settings that cannot be

    def __repr__(self) -> str:
        return f"Lookup({self.topic!r})"

    def record(self, key: K, row: V | None) -> Record:
        """Return the record that puts a row into the topic, or deletes it (``None``), for ``EventProducer.send``. Any
        thread. Raises ``EncodeError``."""
        value = None if row is None else encoder_of(self.codecs[1])(row)
        return Record(self.topic, value, encoder_of(self.codecs[0])(key))

    def table(self) -> GlobalTable[K, V]:
        """Make the empty table of a process. For the event source, which fills it."""
        return self._make()


class DeclaredLookups:
    """The topics that a source looks into: ``by_topic``, in the order of their declarations."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.by_topic: dict[str, Lookup[Any, Any]] = {}

    def declare(
        self,
        topic: str,
        make: Callable[[], GlobalTable[K, V]],
        *,
        on_error: OnError,
        timeout_seconds: float,
        may_be_made_anew: bool,
    ) -> Lookup[K, V]:
        """See ``EventSource.lookup``. ``make`` makes an empty table."""
        what = f"source.lookup({topic!r})"
        self._registry.check_declarable("lookup", topic, "it cannot be a lookup")
        if topic in self.by_topic:
            raise RegistrationError(f"the lookup {topic!r} is declared twice")
        given: object = timeout_seconds  # whatever it is
        if not is_number(given) or not given > 0:
            raise ConfigError(f"timeout_seconds of {what} is {given!r}; it must be a number of seconds, more than 0")
        found = Lookup(topic, make, checked_on_error(on_error), timeout_seconds, may_be_made_anew)
        self.by_topic[topic] = found
        return found

    def topics(self) -> list[TopicSpec]:
        """Return the topics of the lookups as they must be."""
        return [source_topics.spec_of_lookup(self._registry.config, topic) for topic in self.by_topic]
