"""The checks of ``kes doctor``: each looks at one thing, changes nothing, and says what is wrong and what to type."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Final

from streams.cli.cluster import source_admin_of
from streams.cli.findings import OK, PROBLEM, UNKNOWN, WARNING, Finding, Target
from streams.cli.machine_checks import libraries, spark_tasks
from streams.cli.rights import of_input, of_source
from streams.cli.start_places import beginnings
from streams.cli.state_sources import unreadable
from streams.cli.topics import DIFFERS, MISSING, examine, wanted_topics
from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import StreamsError
from streams.kafka.questions.admin import TopicAdmin, Watermarks, standing
from streams.kafka.questions.cluster_view import BrokerView, ClusterQuestions
from streams.kafka.questions.group_checks import GroupChecks, named
from streams.kafka.questions.group_view import GroupQuestions
from streams.kafka.questions.open_transactions import OpenTransactions
from streams.kafka.reading.reader import PartitionReader
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.security import Security
from streams.looks.group_live import LiveGroup, jobs_in, jobs_text, parked_text
from streams.looks.records import Decoder, one_line, shortened
from streams.outcomes import ErrorResponse, Retry, policy_name
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.runtime.ownership.replicas import make_store
from streams.runtime.partition.decoding import decode_policy
from streams.runtime.source_topics import SOURCE
from streams.sak.harmless import harmless
from streams.sak.murmur2 import partition_of
from streams.settings.config import EventSourceConfig
from streams.settings.sources import checked_addresses

OLDEST_KAFKA: Final = (3, 0)
_CLOCK_WARNING, _CLOCK_PROBLEM = 5.0, 60.0
_SAMPLE: Final = 200
"""Offsets at the end of each partition that are looked at."""
_CONNECT_SECONDS: Final = 2.0
_LIMITS: Final = ["transaction.max.timeout.ms", "group.min.session.timeout.ms", "group.max.session.timeout.ms"]


def findings(target: Target) -> Iterator[Finding]:
    """Look at everything, in the order in which things rest on each other. Without a broker that answers nothing more
    is looked at."""
    yield from libraries()
    yield from spark_tasks()
    reached = list(_tried("addresses", lambda: addresses(target.servers)))
    yield from reached
    if all(finding.state == PROBLEM for finding in reached):
        return
    with ClusterQuestions(target.servers, target.security) as questions:
        try:
            brokers = questions.brokers(target.deadline)
        except StreamsError as error:
            yield Finding(
                "brokers", PROBLEM, str(error), "start them, or correct the address and the security settings"
            )
            return
        yield from brokers_reachable(brokers)
        yield from _tried("clock", lambda: clock(questions, target.deadline))
        if target.source is not None:
            yield from _tried("settings", lambda: settings(target, questions, brokers))
    if target.source is None:
        return
    for name, check in _OF_A_SOURCE.items():
        yield from _tried(name, lambda check=check: check(target))  # type: ignore[misc]


def _tried(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from list(check())
    except StreamsError as error:
        yield Finding(name, UNKNOWN, str(error))


# -- the cluster -------------------------------------------------------------------------------------------------------


def addresses(servers: str) -> Iterator[Finding]:
    """The addresses that this machine is given: does something take connections there?"""
    checked_addresses(servers)
    for address in servers.split(","):
        host, _, port = address.strip().rpartition(":")
        yield _reachable("addresses", host.strip("[]"), int(port), "the address of bootstrap_servers")


def brokers_reachable(brokers: list[BrokerView]) -> Iterator[Finding]:
    """The brokers, at the addresses that they give to clients."""
    for broker in brokers:
        found = _reachable("brokers", broker.host, broker.port, f"broker {broker.number}, at its advertised.listeners")
        if found.state != OK:
            yield found
        elif not broker.version:
            yield Finding("brokers", PROBLEM, f"broker {broker.number} at {broker.host}:{broker.port} does not answer")
        elif tuple(map(int, broker.version.split("."))) < OLDEST_KAFKA:
            yield Finding("brokers", PROBLEM, f"broker {broker.number} is Kafka {broker.version}", "3.0 is needed")
        else:
            what = f"broker {broker.number} at {broker.host}:{broker.port} answers like Kafka {broker.version}"
            yield Finding("brokers", OK, what)


def _reachable(check: str, host: str, port: int, what: str) -> Finding:
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        remedy = "check name, port, firewall and whether it runs"
        return Finding(check, PROBLEM, f"{what} {host}:{port} refuses connections: {error}", remedy)
    return Finding(check, OK, f"{host}:{port} takes connections")


def clock(questions: ClusterQuestions, deadline: float) -> Iterator[Finding]:
    """The clock of the controller beside that of this machine."""
    ahead, uncertainty = questions.clock(deadline)
    off = max(abs(ahead) - uncertainty, 0.0)
    text = f"the cluster's clock is {abs(ahead):.3g} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    if off < _CLOCK_WARNING:
        yield Finding("clock", OK, f"the cluster's clock and this machine's agree (within {off + uncertainty:.2g} s)")
        return
    remedy = "synchronise the clocks (chrony, ntpd): record times, retention and timers depend on them"
    yield Finding("clock", PROBLEM if off >= _CLOCK_PROBLEM else WARNING, text, remedy)


def settings(target: Target, questions: ClusterQuestions, brokers: list[BrokerView]) -> Iterator[Finding]:
    """The source's settings against those of the brokers."""
    config = target.config
    assert config is not None
    answering = [broker.number for broker in brokers if broker.version]
    limits = questions.settings(answering[0], _LIMITS, target.deadline)
    found = list(_beyond(config, limits))
    if config.replication_factor > len(brokers):
        text = f"replication_factor is {config.replication_factor}, and there are {len(brokers)} brokers"
        found.append(Finding("settings", PROBLEM, text, "lower it, or add brokers: topics cannot be created"))
    elif config.replication_factor < 3 <= len(brokers):
        text = f"replication_factor is {config.replication_factor}: records are lost with this many disks"
        found.append(Finding("settings", WARNING, text, "set replication_factor=3, min_insync_replicas=2"))
    yield from found or [Finding("settings", OK, "timeouts and replication fit the brokers")]


def _beyond(config: EventSourceConfig, limits: dict[str, str]) -> Iterator[Finding]:
    timeouts = config.timeouts
    asked = {
        "transaction.max.timeout.ms": ("transaction_timeout_seconds", timeouts.transaction_timeout_seconds, 1),
        "group.max.session.timeout.ms": ("session_timeout_seconds", timeouts.session_timeout_seconds, 1),
        "group.min.session.timeout.ms": ("session_timeout_seconds", timeouts.session_timeout_seconds, -1),
    }
    for limit, (name, seconds, sign) in asked.items():
        if limit in limits and sign * seconds * 1000 > sign * int(limits[limit]):
            text = f"{name} is {seconds:g}, and the brokers' {limit} is {limits[limit]}"
            yield Finding(
                "settings", PROBLEM, text, f"{'lower' if sign > 0 else 'raise'} {name}, or change the brokers"
            )


# -- the source --------------------------------------------------------------------------------------------------------


def topics(target: Target) -> Iterator[Finding]:
    """Source, changelog and dead letters, as the settings want them."""
    config = target.config
    assert target.source is not None
    assert config is not None
    wanted = wanted_topics(target.source, [])
    with closing(TopicAdmin(target.settings)) as admin, source_admin_of(config, admin, target.seconds) as elsewhere:
        for entry in wanted:
            client = elsewhere if entry.purpose == SOURCE else admin
            [verdict] = examine(client, [entry], target.seconds, create=False)
            name = f"{entry.spec.name} ({entry.purpose})"
            if verdict.state == MISSING:
                yield Finding("topics", WARNING, f"{name} does not exist", f"kes topics apply {target.name}")
            elif verdict.state == DIFFERS:
                remedy = "change the settings of the source, or the topic, by hand"
                yield from (Finding("topics", PROBLEM, sentence, remedy) for sentence in verdict.differences)
            else:
                yield Finding("topics", OK, f"{name} matches the settings")


def acls(target: Target) -> Iterator[Finding]:
    """The rights of this principal, where the cluster has ACLs: all that the source needs?"""
    config = target.config
    assert target.source is not None
    assert config is not None
    outputs = [spec.name for spec in target.source.outputs]
    with ClusterQuestions(target.servers, target.security) as questions:
        read = (*target.source.inputs, *target.source.lookups)
        needed = [right for topic in read for right in of_input(topic)]
        lacking = questions.lacking(needed + of_source(config, outputs), target.deadline)
    servers = config.source_bootstrap_servers or target.servers
    security = Security.of(config.source_client_settings if config.source_is_elsewhere else config.client_settings)
    with ClusterQuestions(servers, security) as questions:
        lacking = questions.lacking(of_input(config.topic), target.deadline) + lacking
    for right in lacking:
        yield Finding("acls", PROBLEM, f"this principal lacks the right {right}", right.command)
    if not lacking:
        aside = "" if outputs else ", without those on its outputs"
        yield Finding("acls", OK, f"all rights that the source needs{aside}")


def group(target: Target) -> Iterator[Finding]:
    """Members and position of the group, and whether a start would be refused; members of a group that was taken
    over."""
    config = target.config
    assert config is not None
    with GroupChecks(config, seconds=target.seconds) as checks, closing(TopicAdmin(target.settings)) as admin:
        view = checks.described(config.group_id)
        names = ", ".join(member.instance for member in view.members) or "no members"
        text = f"{config.group_id}: {view.state or 'not known to the cluster yet'}, {names}"
        state, remedy = (OK, "") if view.settled else (WARNING, "it is rebalancing: run doctor again")
        yield Finding("group", state, text, remedy)
        for member in view.members:
            if member.problem:
                yield Finding("group", PROBLEM, f"{member.instance}: {member.problem}", "use another group_id for it")
        committed = view.committed.get(config.offsets_topic, {})
        is_there = admin.identity(config.changelog, target.seconds) is not None
        marks = admin.watermarks(config.changelog, None, target.seconds) if is_there else {}
        last = checks.last_records(config.changelog, sorted(marks), OFFSET_KEY) if committed and marks else {}
        begun = beginnings(checks, config, marks).values()
        former = {one.group for one in begun if one.how == "adopt"} - {"", config.group_id}
        revived = [old for name in sorted(former) if (old := checks.described(name)).members]
    for number, offset in sorted(committed.items()):
        there = decode_offset(last[number]).offset if number in last else None
        if there is None or there < offset:
            where = f"{config.topic}[{number}]: the group's offset {offset} is ahead of the changelog's ({there})"
            remedy = f"kes offsets accept {target.name} -p {number}"
            if there is None:
                remedy = (
                    f"if another program has stopped there: kes offsets start {target.name} --from-group {view.group}"
                )
            yield Finding("group", PROBLEM, f"{where}: the source would not start", remedy)
    for old in revived:
        text = f"{old.group} has members again ({named(old.members)}), and this source goes on in its place"
        yield Finding("group", WARNING, f"{text}: both handle the same records", "stop them for good")


def progress(target: Target) -> Iterator[Finding]:
    """The next records of the source: can each be read? Without a member it may have stopped at one of them."""
    config, source = target.config, target.source
    assert source is not None
    assert config is not None
    with closing(GroupQuestions(target.servers, target.security)) as questions:
        view = questions.describe_group(config.group_id, target.seconds)
    decoder, left, ahead, unread = Decoder(source), 0, list[IncomingRecord](), False
    for topic in (config.topic, *source.inputs):
        committed = view.committed.get(config.offsets_topic if topic == config.topic else topic, {})
        for lag, record in _next_records(target, topic, committed):
            left += lag
            [record] = source.received(topic, [record])
            ahead += [record] if committed else []
            problem = decoder.content(record).problem
            declared = source._declared
            policy = decode_policy(
                declared.inputs.specs.get(topic), declared.router.routes, record, config.decode_policy
            )
            stops = isinstance(policy, Retry)
            if problem and (not isinstance(policy, Retry) or policy.then is ErrorResponse.FAIL_CONSUMER):
                unread = True
                then = "a start would stop there" if stops else f"{policy_name(policy)} decides"
                text = f"the next record of {topic}[{record.partition}] cannot be read, and {then}: "
                remedy = f"fix the event class, set decode_policy, or {_skip(target, record)}"
                found = f"{text}{record.where}: {harmless(problem)[:200]}"
                yield Finding("progress", PROBLEM if stops else WARNING, found, remedy)
    if ahead and not view.members:
        places = ", ".join(record.where for record in ahead[:5]) + (", ..." if len(ahead) > 5 else "")
        text = f"no member is running, and records are waiting ({left:,}); the next start continues at {places}"
        remedy = f"start it; if it stopped there, its log has the error: fix the handler, or {_skip(target, ahead[0])}"
        yield Finding("progress", WARNING, text, remedy)
    elif not unread:
        yield Finding("progress", OK, f"records are waiting ({left:,})" if left else "no records are waiting")


def _skip(target: Target, record: IncomingRecord) -> str:
    own = target.config is not None and record.topic == target.config.topic
    place = f"{'' if own else record.topic + ':'}{record.partition}@{record.offset}"
    return f"kes skip {target.name} {place} --dead-letter --reason '...'"


def _next_records(target: Target, topic: str, committed: Mapping[int, int]) -> Iterator[tuple[int, IncomingRecord]]:
    """Yield the first record behind the group's offset in each partition of an input, and how many are left there."""
    own = target.config is not None and topic == target.config.topic
    settings = target.source_settings if own else target.settings
    with closing(TopicAdmin(settings)) as admin, closing(PartitionReader(settings)) as reader:
        if admin.identity(topic, target.seconds) is None:
            return
        marks = admin.watermarks(topic, None, target.seconds)
        lags = admin.tails.without_markers(topic, standing(committed, marks))
        first = {one.partition: max(one.committed or 0, one.start) for one in lags if one.lag}
        spans = {number: (start, min(marks[number].stable, start + _SAMPLE)) for number, start in first.items()}
        found = reader.read_all(topic, spans, stalled_after_seconds=target.seconds)
        yield from [(one.lag, found[one.partition][0]) for one in lags if found.get(one.partition)]


def parked(target: Target) -> Iterator[Finding]:
    """The parked keys, and parked and old jobs, of the running members: neither position nor lag tells of them."""
    config = target.config
    assert config is not None
    with LiveGroup(config, "kes-doctor") as group:
        view, live, problems = group.read(target.seconds)
    if text := parked_text(live, time.time()):
        yield Finding("parked", WARNING, text, f"kes parked list {target.name}")
    elif problems:
        yield Finding("parked", UNKNOWN, "; ".join(problems), f"kes parked list {target.name}")
    elif view.members:
        yield Finding("parked", OK, "no key is parked, as members report it")
    if text := jobs_text(live, time.time()):
        is_parked = any(each.parked for each in jobs_in(live))  # an old one may have been meant to begin late
        command = f"kes jobs list {target.name}"
        yield Finding("jobs", WARNING, text, f"{command} --parked") if is_parked else Finding("jobs", OK, text, command)


def transactions(target: Target) -> Iterator[Finding]:
    """Transactions that hold up readers of the source's topics without an end."""
    config = target.config
    assert config is not None
    hanging = 0
    with WireClient(target.servers, "kes-doctor", target.security) as client:
        with closing(TopicAdmin(target.settings)) as admin:
            names = [config.changelog, config.dead_letters, *config.own_inputs]
            names += [] if config.source_is_elsewhere else [config.topic]
            there = {name: found[1] for name in names if (found := admin.identity(name, target.seconds))}
        for name, count in there.items():
            for txn in OpenTransactions(client).find(name, range(count), target.deadline):
                if txn.is_hanging:
                    hanging += 1
                    where = f"{name}[{txn.partition}]: a transaction from {txn.start_offset} on never ends"
                    arguments = f"--topic {name} --partition {txn.partition} --start-offset {txn.start_offset}"
                    yield Finding("transactions", PROBLEM, where, f"kes txn end {target.name} {arguments}")
    if not hanging:
        yield Finding("transactions", OK, "no hanging transaction")


def keys(target: Target) -> Iterator[Finding]:
    """The newest records of the source: are their keys where murmur2 puts them?"""
    config = target.config
    assert config is not None
    source_settings = target.source_settings
    with closing(TopicAdmin(source_settings)) as admin, closing(PartitionReader(source_settings)) as reader:
        if admin.identity(config.topic, target.seconds) is None:
            return
        marks: dict[int, Watermarks] = admin.watermarks(config.topic, None, target.seconds)
        spans = {number: (max(mark.start, mark.stable - _SAMPLE), mark.stable) for number, mark in marks.items()}
        found = reader.read_all(config.topic, spans, stalled_after_seconds=target.seconds)
    records = [record for records in found.values() for record in records if record.key is not None]
    wrong = [record for record in records if partition_of(record.key or b"", len(marks)) != record.partition]
    if not wrong:
        yield Finding("keys", OK, f"the keys of the newest {len(records):,} records are where murmur2 puts them")
        return
    yield Finding(
        "keys",
        PROBLEM,
        f"{len(wrong):,} of the newest {len(records):,} records of {config.topic} are in other partitions than their "
        f"keys belong to (murmur2): {_example(wrong[-1], len(marks))}. A key in two partitions has two states",
        "send with streams.EventProducer, or partitioner=murmur2_random in clients of librdkafka; nothing is wrong if "
        "each key is always sent to the same partition on purpose, or if partitions were added",
    )


def _example(record: IncomingRecord, partitions: int) -> str:
    due = partition_of(record.key or b"", partitions)
    return f"{record.where}, key {harmless(record.key)[:40]}, belongs to partition {due}"


def state(target: Target) -> Iterator[Finding]:
    """The newest changes of the state: can the source's codecs read them?"""
    config, source = target.config, target.source
    assert config is not None
    assert source is not None
    topic, store = config.changelog, make_store(source.program().store_factory, TopicPartition(config.topic, 0))
    with closing(TopicAdmin(target.settings)) as admin, closing(PartitionReader(target.settings)) as reader:
        if admin.identity(topic, target.seconds) is None:
            return
        marks: dict[int, Watermarks] = admin.watermarks(topic, None, target.seconds)
        spans = {number: (max(mark.start, mark.stable - _SAMPLE), mark.stable) for number, mark in marks.items()}
        found = reader.read_all(topic, spans, stalled_after_seconds=target.seconds)
    last = {
        (number, record.key): record
        for number, records in found.items()
        for record in records
        if record.key and not record.key.startswith(RESERVED_KEY_PREFIX)
    }
    wrong = [
        f"{record.where}, key {shortened(one_line(name), 60)}: {problem}"
        for (_, key), record in last.items()
        for name, problem in [unreadable(store, key or b"", record.value) if record.value is not None else ("", "")]
        if problem
    ]
    store.revoked()
    if not wrong:
        yield Finding("state", OK, f"the newest changes of {topic} can be read: those of {len(last):,} key(s)")
        return
    yield Finding(
        "state",
        PROBLEM,
        f"{len(wrong):,} of the newest values of {topic} cannot be read, the last: {harmless(wrong[-1])}",
        f"repair the class and deploy it, or mend the values: kes state repair {target.name}; all of them: kes state "
        f"verify {target.name} --what changelog --decode",
    )


_OF_A_SOURCE: Final = {
    "acls": acls,
    "topics": topics,
    "group": group,
    "progress": progress,
    "parked": parked,
    "transactions": transactions,
    "keys": keys,
    "state": state,
}
