"""Declare lookups of an event source: whole topics as tables, beside the events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from streams.core.router import Router
from streams.errors import ConfigError, RegistrationError
from streams.model.shortcuts import encoder_of
from streams.model.topics import TopicSpec
from streams.outcomes import STOP
from streams.protocols import Codec
from streams.records import Record
from streams.runtime import source_topics
from streams.runtime.reading.view_follower import OnError
from streams.sak.numbers import is_number
from streams.settings.config import EventSourceConfig
from streams.views.global_change_log import checked_on_error
from streams.views.global_table import GlobalTable, make_table

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


class LookupDeclarations:
    """The part of ``EventSource`` about lookups."""

    config: EventSourceConfig
    _router: Router
    _lookups: dict[str, Lookup[Any, Any]]

    def lookup(
        self,
        topic: str,
        *,
        key: type[K],
        value: type[V],
        ordered: bool = False,
        key_codec: Codec[K] | None = None,
        value_codec: Codec[V] | None = None,
        on_error: OnError = STOP,
        timeout_seconds: float = 300.0,
        may_be_made_anew: bool = False,
    ) -> Lookup[K, V]:
        """Look into a table: all partitions of a compacted topic, in the memory of each process. Returns its
        declaration, for ``ctx.lookup(table)``.

        The topic is on the cluster of the group, with any number of partitions. It is read with the start of the
        source, to its end before the source joins its group, and followed until the source stops. Only what is
        committed comes in. A handler reads the table as of now, and not as of its event's place; but a partition never
        looks into an older table than it did before: its next owner waits until its own table is as far.

        ``ordered``, ``key_codec``, ``value_codec``: see ``Table.factory``. ``on_error``: what a record without key, or
        one that cannot be decoded, does (default: the source stops), as for ``GlobalChangeLog``. ``timeout_seconds``:
        how long the start, or a partition, waits for the table before the source stops with ``NotCaughtUp``.
        ``may_be_made_anew``: a topic that was deleted and created again is taken as it is at the next start, instead of
        refused. Raises ``ConfigError``; ``RegistrationError`` after the start, and for a second declaration.
        """
        what = f"source.lookup({topic!r})"
        source_topics.check_declarable(self._router, self.config, "lookup", topic, "it cannot be a lookup")
        if topic in self._lookups:
            raise RegistrationError(f"the lookup {topic!r} is declared twice")
        given: object = timeout_seconds  # whatever it is
        if not is_number(given) or not given > 0:
            raise ConfigError(f"timeout_seconds of {what} is {given!r}; it must be a number of seconds, more than 0")

        def make() -> GlobalTable[K, V]:
            return make_table(topic, key, value, ordered, key_codec, value_codec)

        found = Lookup(topic, make, checked_on_error(on_error), timeout_seconds, may_be_made_anew)
        self._lookups[topic] = found
        return found

    @property
    def lookups(self) -> list[str]:
        """Return the topics of the lookups, in the order of their declarations."""
        return [*self._lookups]

    def lookup_topics(self) -> list[TopicSpec]:
        """Return the topics of the lookups as they must be."""
        return [source_topics.spec_of_lookup(self.config, topic) for topic in self._lookups]
