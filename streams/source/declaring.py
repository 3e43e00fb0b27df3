"""The declaring half of ``EventSource``: inputs, outputs, joined tables, lookups, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from streams.errors import RegistrationError
from streams.formats.cloudevents import CloudEvents
from streams.formats.rules import Deleted, TypeRule
from streams.model.own_metrics import BUCKETS, MetricKind, OwnMetric
from streams.model.partitioners import NullKeys, Partitioner, PartitionerName
from streams.model.topics import TopicSpec
from streams.model.topology import Topology
from streams.outcomes import STOP, ErrorPolicy, ExecutionState
from streams.protocols import Codec, DiskEngine
from streams.records import IncomingRecord
from streams.runtime.partition.event_context import EventContext
from streams.runtime.reading.view_follower import OnError
from streams.settings.config import EventSourceConfig
from streams.source.declarations import CallbackT
from streams.source.declaring_handlers import DeclaringHandlers
from streams.source.lookups import Lookup
from streams.stores.joined import Joined
from streams.stores.joined_table import Update
from streams.views.global_table import GlobalTable, make_table

StoreT = TypeVar("StoreT")
K = TypeVar("K")
V = TypeVar("V")
UpdateHandler = Callable[[EventContext[StoreT], Update[K, V]], ExecutionState | None]


class Declaring(DeclaringHandlers[StoreT]):
    """The methods of ``EventSource`` that declare something. Each calls a part of ``Declarations``."""

    @property
    def config(self) -> EventSourceConfig:
        """Return the settings. They may be replaced until the start."""
        return self._declared.config

    @config.setter
    def config(self, config: EventSourceConfig) -> None:
        self._declared.config = config

    # -- partitions that come and go -----------------------------------------------------------------------------------

    def on_assigned(self, function: CallbackT) -> CallbackT:
        """Have ``function(source, change)`` called when a partition comes to this member, before it is restored. As a
        decorator, or with the function; ``change`` is a ``PartitionChange``.

        All functions of this kind may be plain or ``async``, and run on the event loop. Those of one partition run one
        after the other. Each call has half of ``drain_timeout_seconds``; then it is cancelled, and all goes on. An
        error, or a call that is cancelled, is logged and counted (``CallbackFailed``), and changes nothing else. A
        plain function that blocks stops the whole member, as a plain handler does. Raises ``RegistrationError`` for
        what cannot be called with two arguments, and after the start.
        """
        return self._declared.add_callback("on_assigned", function)

    def on_activated(self, function: CallbackT) -> CallbackT:
        """Have ``function(source, change)`` called when a partition works; see ``on_assigned``. Plain functions are
        called before its first event. After a restart within this member it is called again (``restarted``)."""
        return self._declared.add_callback("on_activated", function)

    def on_will_revoke(self, function: CallbackT) -> CallbackT:
        """Have ``function(source, change)`` called before a partition that works goes to another member, or stops with
        the source; see ``on_assigned``. From its call on no event begins, and it is awaited, so it may ``interject`` a
        last time: behind the events that have begun. Never called for a loss: nothing could be committed then."""
        return self._declared.add_callback("on_will_revoke", function)

    def on_revoked(self, function: CallbackT) -> CallbackT:
        """Have ``function(source, change)`` called when a partition has gone, for whatever reason; see
        ``on_assigned``."""
        return self._declared.add_callback("on_revoked", function)

    # -- topics --------------------------------------------------------------------------------------------------------

    def input(
        self,
        topic: str,
        *,
        event: type[Any] | None = None,
        nulls: ErrorPolicy | type[Deleted] | None = None,
        types: TypeRule | None = None,
    ) -> str:
        """Declare a further topic that the source reads. Returns its name.

        Partition p of the source is partition p of all its inputs, with one state, one order and one position: so all
        have the same number of partitions, and the same key is in the same partition of each (which a start cannot
        see). Between topics there is no order but time: the record with the oldest timestamp comes first, as far as
        records are here; an input that may have older ones is waited for ``alignment_seconds``.

        Handlers are found by the type header, as in the source's own topic, or by the rule ``types`` of
        ``streams.formats``. ``event=Click`` is ``types=Only(Click)``: every record is of this type, whatever headers
        it has. ``nulls``: the error policy of records without a value (``SKIP``, say), else ``decode_policy``.

        A start verifies the topic, and never makes it: ``kes topics apply`` does, or ``create_source``. Where a
        partition begins in an input that was not one before is decided by ``auto_offset_reset``. Raises
        ``ConfigError``; ``RegistrationError`` after the start, and for a second declaration.
        """
        return self._declared.inputs.declare(topic, event, nulls, types)

    def join(
        self,
        topic: str,
        *,
        key: type[K],
        value: type[V],
        ordered: bool = False,
        key_codec: Codec[K] | None = None,
        value_codec: Codec[V] | None = None,
        partitioner: PartitionerName | None = "murmur2",
        engine: DiskEngine | None = None,
        on_error: ErrorPolicy | None = None,
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
        return self._declared.joins.declare(
            topic,
            (key, value),
            (key_codec, value_codec),
            ordered=ordered,
            partitioner=partitioner,
            engine=engine,
            on_error=on_error,
        )

    def register_update(
        self,
        table: Joined[K, V],
        handler: UpdateHandler[StoreT, K, V] | None = None,
        /,
        *,
        on_error: ErrorPolicy | None = None,
    ) -> Callable[[UpdateHandler[StoreT, K, V]], UpdateHandler[StoreT, K, V]]:
        """Register the handler of a joined table's updates, as a decorator or with the handler as second argument.

        It is a plain function of ``(ctx, update)``, with ``update.key``, ``update.old`` and ``update.new``, and is
        called once for each record of the table, in the transaction that changes the row. ``ctx.joined(table)`` has the
        new row already. If it fails for good, ``on_error`` (default: ``config.error_policy``) decides about its
        effects; the row is changed all the same. Raises ``RegistrationError``.
        """
        return self._declared.joins.register_update(table, handler, on_error)

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

        def make() -> GlobalTable[K, V]:
            return make_table(topic, key, value, ordered, key_codec, value_codec)

        return self._declared.lookups.declare(
            topic, make, on_error=on_error, timeout_seconds=timeout_seconds, may_be_made_anew=may_be_made_anew
        )

    def output(
        self,
        topic: str,
        *,
        num_partitions: int | None = None,
        replication_factor: int | None = None,
        configs: Mapping[str, str] | None = None,
        partitioner: Partitioner = "murmur2",
        form: CloudEvents | None = None,
        null_keys: NullKeys = "sticky",
    ) -> str:
        r"""Declare a topic that handlers forward to. Returns its name.

        Once one is declared, handlers forward to declared topics only (and to the source's own): a record for another
        one is refused, and its event meets its error policy. A start verifies partitions, replication and ``configs``
        (a topic's settings by their Kafka names) of each declared topic; what is not given is as the source's settings
        have it. A topic that is missing, or different, is an error: outputs are made by ``kes topics apply`` or
        ``create_source``, never in silence.

        ``partitioner`` places the records of ``ctx.forward`` that have a key and name no partition: ``"murmur2"``, as
        Java's clients do; ``"crc32"``, as librdkafka does by default; ``"fnv1a"``, as sarama and goka do; or a function
        of the key (bytes) and the number of partitions. The function is called on the event loop, once for each key of
        100,000 that are remembered, and gives a key the same partition each time. An event that it fails for, or gives
        no partition to, meets its error policy. Dead letters keep the partition of their event.

        ``null_keys`` places records without a key: ``"sticky"``, those of one transaction in one partition, each in
        turn, which makes few and large batches; ``"spread"``, each record in turn; ``"cause"``, in the partition of
        the event that sends them, modulo their number, so that a replay places them alike.

        ``form=CloudEvents(source="/bank")`` writes events as CloudEvents, without our headers; ready ``Record``\ s are
        sent as they are.

        Raises ``ConfigError``; ``RegistrationError`` after the start, and for a second declaration.
        """
        return self._declared.outputs.declare(
            topic, num_partitions, replication_factor, configs, partitioner, form, null_keys
        )

    def metric(
        self,
        name: str,
        kind: MetricKind = "counter",
        *,
        labels: tuple[str, ...] = (),
        buckets: tuple[float, ...] = BUCKETS,
        help: str = "",
    ) -> str:
        """Declare a metric of the source's own, for ``ctx.count`` and ``ctx.observe``. Returns its name.

        It is exported beside those of the toolkit, with the label ``group``; what it counts is that of committed
        events. ``labels`` are the names of further ones: each has 100 values at most, all others are ``other``.
        ``buckets``: of a histogram. Raises ``ConfigError``; ``RegistrationError`` after the start, and for a second
        declaration.
        """
        router = self._declared.router
        router.refuse_if_frozen(f"the metric {name!r}")
        if name in router.own_metrics:
            raise RegistrationError(f"there is a metric {name!r} already")
        router.own_metrics[name] = OwnMetric(name, kind, labels, buckets, help)
        return name

    @property
    def inputs(self) -> list[str]:
        """Return the inputs beside the source's own topic: requests for visits, its loop, and the declared
        ones in their order."""
        return [*self._declared.inputs.by_topic]

    def received(self, topic: str, records: list[IncomingRecord]) -> list[IncomingRecord]:
        """Return records of an input, or of the source's own topic, as handlers have them: with the types that its rule
        gives them."""
        return self._declared.inputs.received(topic, records)

    def input_topics(self) -> list[TopicSpec]:
        """Return the declared inputs as they must be."""
        return self._declared.inputs.topics()

    @property
    def lookups(self) -> list[str]:
        """Return the topics of the lookups, in the order of their declarations."""
        return [*self._declared.lookups.by_topic]

    def lookup_topics(self) -> list[TopicSpec]:
        """Return the topics of the lookups as they must be."""
        return self._declared.lookups.topics()

    @property
    def outputs(self) -> list[TopicSpec]:
        """Return the declared outputs, as they must be, in the order of their declarations."""
        return [*self._declared.outputs.by_topic.values()]

    @property
    def topology(self) -> Topology:
        """Return what the source reads, handles, keeps and sends, as a value: see ``Topology``."""
        return self._declared.topology
