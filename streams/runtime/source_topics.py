"""The topics of an event source: its own are made when they are missing, all are verified when they are there, none is
ever changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import anyio
import msgspec

from streams.core.router import Router
from streams.errors import BrokerUnavailable, RegistrationError, TopicError
from streams.model.topics import InputSpec, TopicSpec, missing
from streams.runtime.ports import Connections, Topics
from streams.settings.config import EventSourceConfig
from streams.settings.groups import check_topic

T = TypeVar("T")

_log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 10.0
"""One request to the broker takes so many seconds, at most."""
FIRST_PAUSE: Final = 0.5
"""The second try at the start comes so many seconds after the first. Each further pause is twice as long."""
LONGEST_PAUSE: Final = 5.0
"""No pause between two tries is longer than so many seconds."""


SOURCE: Final = "source"
OUTPUT: Final = "output"
INPUT: Final = "input"
TABLE: Final = "table"
LOOKUP: Final = "lookup"
LOOP: Final = "loop"
VISITS: Final = "visits"
"""Messages and ``kes topics`` name the purposes of topics by these words."""
KEPT_UNTIL_HANDLED: Final = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
"""Settings of the loop's topic, whose records go when they are handled (``ownership.loop_purge``) and not by their age,
and of the requests for visits, which are few and stay."""


def purposes(config: EventSourceConfig) -> dict[str, str]:
    """Return the names of the source's own topics, each with its purpose in a word or two. The source comes first."""
    found = {config.topic: SOURCE, config.changelog: "changelog", config.dead_letters: "dead letters"}
    found |= {name: LOOP if name == config.loop_topic else VISITS for name in config.own_inputs}
    return found | ({config.offsets_topic: "offsets"} if config.source_is_elsewhere else {})


def check_declarable(router: Router, config: EventSourceConfig, method: str, topic: str, cannot: str) -> None:
    """Check that this method of the source can declare a topic now. Raises ``ConfigError``, ``RegistrationError``."""
    if router.is_frozen:
        raise RegistrationError(f"source.{method}({topic!r}) comes too late: declare it before the source is started")
    check_topic(f"the topic of source.{method}", topic)
    if topic in purposes(config):
        raise RegistrationError(f"the topic {topic!r} is the event source's own: {cannot}")


def specs(config: EventSourceConfig) -> list[TopicSpec]:
    """Return the source's own topics as they must be: source, changelog, dead letters, loop, requests for visits, and
    the stand-in of a source on another cluster; equal numbers of partitions. The source comes first."""
    # The changelog is compacted: the last record of each key is the state, and the older ones are not needed.
    configs = {config.changelog: {"cleanup.policy": "compact"}, **dict.fromkeys(config.own_inputs, KEPT_UNTIL_HANDLED)}
    return [spec(config, name, configs=configs.get(name)) for name in purposes(config)]


def spec(
    config: EventSourceConfig,
    name: str,
    partitions: int | None = None,
    replication_factor: int | None = None,
    configs: Mapping[str, str] | None = None,
) -> TopicSpec:
    """Return a topic as it must be; what is not given is as the settings have it."""
    replicated = {"min.insync.replicas": str(config.min_insync_replicas)} if config.min_insync_replicas > 1 else {}
    return TopicSpec(
        name=name,
        partitions=config.num_partitions if partitions is None else partitions,
        replication_factor=config.replication_factor if replication_factor is None else replication_factor,
        configs=replicated | dict(configs or {}),
    )


def spec_of_input(config: EventSourceConfig, given: InputSpec) -> TopicSpec:
    """Return a further input as it must be; the topic of a joined table is compacted."""
    if given.table is None:
        return spec(config, given.topic)
    found = spec(config, given.topic, configs={"cleanup.policy": "compact"})
    return msgspec.structs.replace(found, may_delete=True)


def spec_of_lookup(config: EventSourceConfig, topic: str) -> TopicSpec:
    """Return the topic of a lookup as it must be: compacted, with any number of partitions."""
    # It has one partition or any larger number: a lookup is read as a whole, and not by partitions of the source.
    found = spec(config, topic, 1, configs={"cleanup.policy": "compact"})
    return msgspec.structs.replace(found, may_have_more=True, may_delete=True)


def purpose_of_input(given: InputSpec) -> str:
    """Return the purpose of a further input."""
    return INPUT if given.table is None else TABLE


async def prepare(
    config: EventSourceConfig,
    connections: Connections,
    outputs: Collection[TopicSpec] = (),
    inputs: Collection[TopicSpec] = (),
    lookups: Collection[TopicSpec] = (),
) -> None:
    """Create or verify at the start; ``outputs``, further ``inputs`` and ``lookups`` are verified, and never created.
    Waits as long as it takes for a broker that does not answer, or that is slow to make a topic, and logs it each time;
    a refusal raises ``TopicError``."""
    pause = FIRST_PAUSE
    while True:
        try:
            created = await create_and_verify(config, connections, outputs, inputs, lookups)
        except BrokerUnavailable as error:
            _log.warning("waiting for the broker: %s", error)
            await anyio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
        else:
            if created:
                _log.info("created topics: %s", ", ".join(created))
            return


async def create_and_verify(
    config: EventSourceConfig,
    connections: Connections,
    outputs: Collection[TopicSpec] = (),
    inputs: Collection[TopicSpec] = (),
    lookups: Collection[TopicSpec] = (),
    *,
    creates_others: bool = False,
) -> list[str]:
    """Create missing topics, verify the others, return the names of the created ones. Raises ``TopicError`` for
    differences, ``BrokerUnavailable``. ``outputs``, further ``inputs`` and ``lookups`` may be others': one that is
    missing is a difference, unless ``creates_others``.

    When there is a changelog, the source topic may have more partitions than the settings: members go on with those
    that they know, and warn. Without a changelog that is refused.
    """
    source, changelog, *others = specs(config)

    def is_missing(topics: Topics) -> bool:
        return missing(changelog.name) in topics.differences([changelog])

    # The changelog is made at the first start, which decides the partitions of keys once for all. So the settings must
    # fit then.
    is_new = await _with(connections.topics, connections, is_missing)
    wanted = [msgspec.structs.replace(source, may_have_more=not is_new), changelog, *others]
    if creates_others:
        wanted, outputs, inputs, lookups = [*wanted, *outputs, *inputs, *lookups], (), (), ()
    foreign = [(OUTPUT, [*outputs]), (INPUT, [*inputs]), (LOOKUP, [*lookups])]

    def work(topics: Topics, wanted: Sequence[TopicSpec], foreign: Sequence[Foreign] = ()) -> list[str]:
        # All is compared before anything is made: a start that is refused leaves no topic behind.
        absent = {missing(spec.name) for spec in wanted}
        refused = [sentence for sentence in topics.differences(wanted) if sentence not in absent]
        if refused := refused + [sentence for found in foreign for sentence in _of_others(topics, *found)]:
            raise TopicError("; ".join(refused) + _of_growth(refused, [source, changelog]))
        created = topics.create(wanted, REQUEST_SECONDS)
        # They are compared once more: another member may have made them at the same time, with other settings.
        differences = topics.differences(wanted)
        unheard_of = {missing(spec.name) for spec in wanted}.intersection(differences)
        if unheard_of:  # they are there since a moment ago, but this broker does not know them yet
            raise BrokerUnavailable("; ".join(sorted(unheard_of)))
        if differences:
            raise TopicError("; ".join(differences))
        return created

    if not config.source_is_elsewhere:
        return await _with(connections.topics, connections, partial(work, wanted=wanted, foreign=foreign))
    # The source comes first: if its cluster refuses, nothing is made on ours.
    created = await _with(connections.source_topics, connections, partial(work, wanted=wanted[:1]))
    return created + await _with(connections.topics, connections, partial(work, wanted=wanted[1:], foreign=foreign))


def _of_growth(sentences: Collection[str], specs: Sequence[TopicSpec]) -> str:
    """Return the way out if the number of partitions of one of these topics differs; else ``""``."""
    for spec in specs:
        ends = f"topic {spec.name} has ", f"partitions, settings say {spec.partitions}"
        if any(one.startswith(ends[0]) and one.endswith(ends[1]) for one in sentences):
            return (
                ". After kes topics regrow, or grow, set num_partitions of the settings to the new number; if that "
                "command was interrupted, run it again: a part of the topics is not grown yet"
            )
    return ""


Foreign = tuple[str, list[TopicSpec]]
"""A purpose, and the topics of it that may be others'."""


def _of_others(topics: Topics, purpose: str, specs: Sequence[TopicSpec]) -> list[str]:
    """List the differences of declared outputs, inputs or lookups, each with the way out."""
    absent = {missing(spec.name) for spec in specs}
    article = "a" if purpose == LOOKUP else "an"
    make = f"{article} {purpose} is never made at the start: kes topics apply MODULE:SOURCE makes it"
    correct = f"correct source.{purpose}(...), or the topic"
    if purpose == INPUT:
        correct = (
            "all inputs and joined tables of a source have the same number of partitions, with the same key in the "
            "same partition; a joined table's topic is compacted, or its rows would go with their age"
        )
    elif purpose == LOOKUP:
        correct = "the topic of a lookup is compacted, or its rows would go with their age"
    found = topics.differences(specs) if specs else []
    return [f"{sentence} ({make if sentence in absent else correct})" for sentence in found]


async def delete(config: EventSourceConfig, connections: Connections) -> list[str]:
    """Delete the topics; returns their names. A source on another cluster belongs to others: it stays."""
    # The source comes first in this list.
    names = [spec.name for spec in specs(config)][1 if config.source_is_elsewhere else 0 :]

    def work(topics: Topics) -> list[str]:
        topics.delete(names, REQUEST_SECONDS)
        return names

    return await _with(connections.topics, connections, work)


async def _with(connect: Callable[[], Topics], connections: Connections, work: Callable[[Topics], T]) -> T:
    worker = connections.worker("kes-topics")

    def on_thread() -> T:
        topics = connect()
        try:
            return work(topics)
        finally:
            topics.close()

    try:
        return await worker.call(on_thread)
    finally:
        worker.abandon()
