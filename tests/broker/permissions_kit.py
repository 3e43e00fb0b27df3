"""The table of least rights: what each feature takes, and how a test uses it with these rights and no others.

``docs/guides/security.md`` shows the same table: ``rows()``, which a test of ``test_permissions.py`` compares.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import TopicPartition

from streams import DEAD_LETTER, AsyncJobScheduler, EventContext, EventProducer, EventSource, GlobalChangeLog
from streams.broker import KafkaBroker
from streams.kafka.group.status_board import StatusBoard
from streams.kafka.permissions import Right
from streams.kafka.questions.group_checks import GroupChecks
from streams.kafka.wire.client import WireClient
from streams.kafka.wire.security import PLAINTEXT
from streams.model.topics import commit_log_name, loop_name, visits_name
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from tests.broker.client_kit import leave_hanging
from tests.broker.engine_kit import Lab, Running, until
from tests.broker.membership_kit import untyped as admin
from tests.unit.waiting import wait_until
from tests.vocabulary import Added, Ring, Total, Totals, count

USER = "alice"
FOLDER = tempfile.TemporaryDirectory(prefix="rights-")
Kes = Callable[..., tuple[int, Any, str]]

_RESOURCES = {"topic": "TOPIC", "group": "GROUP", "cluster": "BROKER", "transactional-id": "TRANSACTIONAL_ID"}
_OPERATIONS = {
    "DescribeConfigs": "DESCRIBE_CONFIGS",
    "ClusterAction": "CLUSTER_ACTION",
    "AlterConfigs": "ALTER_CONFIGS",
}


class Office:
    """Names of one test, its user's settings (as arguments, or in the environment), and the rights that he gets from
    the administrator."""

    def __init__(self, broker: KafkaBroker, prefix: str, partitions: int = 1) -> None:
        self.broker = broker
        self.lab = Lab(broker.plain_bootstrap_servers, prefix, partitions)
        self.settings = broker.client_settings(USER)
        self.environment = {
            "KES_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
            **{f"KES_CLIENT_SETTINGS_{name.upper().replace('.', '_')}": text for name, text in self.settings.items()},
        }
        self.user = {"bootstrap_servers": broker.bootstrap_servers, "client_settings": self.settings}
        self.prefix = prefix
        self._admin = admin.AdminClient({"bootstrap.servers": broker.plain_bootstrap_servers})
        lab = self.lab
        self.names = {
            "SOURCE": lab.topic,
            "CHANGELOG": lab.changelog,
            "DEAD_LETTERS": lab.dead_letter_topic,
            "OUTPUT": lab.output,
            "GROUP": lab.group,
            "LOOP": loop_name(lab.group, lab.topic),
            "VISITS": visits_name(lab.group, lab.topic),
            "COMMITS": commit_log_name(lab.group, lab.topic),
            "INPUT": f"{prefix}more",
            "FILE": str(Path(FOLDER.name) / f"{prefix}state"),
            "ID": f"{prefix}id",
        }

    def right(self, text: str) -> Right:
        """The right that a line of the table means here, such as ``Read topic SOURCE`` or ``Write group GROUP*``."""
        operation, kind, *rest = text.split()
        name = "".join(rest)
        for word in sorted(self.names, key=len, reverse=True):
            name = name.replace(word, self.names[word])
        return Right(operation, kind, name.removesuffix("*"), name.endswith("*"))

    def grant(self, rights: Sequence[str]) -> None:
        """Give the user these rights, and take all others away."""
        bindings = {_binding(self.right(text)) for text in rights}
        every = admin.ResourceType.ANY, None, admin.ResourcePatternType.ANY, None, None
        filter_ = admin.AclBindingFilter(*every, admin.AclOperation.ANY, admin.AclPermissionType.ANY)
        [deleted] = self._admin.delete_acls([filter_]).values()
        deleted.result(30)
        for done in self._admin.create_acls(list(bindings)).values() if bindings else ():
            done.result(30)
        # The controller has them by now, the broker a moment later.
        wait_until(lambda: set(self._admin.describe_acls(filter_).result(30)) == bindings)

    def begins_at(self, topic: str) -> int:
        """The first offset of partition 0 that is not deleted."""
        partition = TopicPartition(topic, 0)
        [found] = self._admin.list_offsets({partition: admin.OffsetSpec.earliest()}).values()
        return int(found.result(30).offset)

    def source(self, **settings: Any) -> EventSource[Totals]:
        """A source of the user's that sends each total."""
        return self.lab.telling(**{**self.user, **settings})


def _binding(right: Right) -> Any:
    operation = _OPERATIONS.get(right.operation, right.operation.upper())
    pattern = admin.ResourcePatternType.PREFIXED if right.prefixed else admin.ResourcePatternType.LITERAL
    return admin.AclBinding(
        admin.ResourceType[_RESOURCES[right.kind]],
        right.name or "kafka-cluster",
        pattern,
        f"User:{USER}",
        "*",
        admin.AclOperation[operation],
        admin.AclPermissionType.ALLOW,
    )


Use = Callable[[Office, Kes], Awaitable[None]]


class Feature(NamedTuple):
    """A row of the table. ``prepare`` is the administrator's part; ``use`` raises what the user meets. ``also``: rights
    whose lack is no error, but hides something."""

    name: str
    rights: tuple[str, ...]
    prepare: Use
    use: Use
    partitions: int = 1
    also: tuple[str, ...] = ()


FEATURES: dict[str, Feature] = {}


def feature(
    name: str, *rights: str, prepare: Use, partitions: int = 1, also: Sequence[str] = ()
) -> Callable[[Use], Use]:
    def add(use: Use) -> Use:
        FEATURES[name] = Feature(name, rights, prepare, use, partitions, tuple(also))
        return use

    return add


class Refused(Exception):
    """A command ended with this message."""


async def run(kes: Kes, source: EventSource[Any] | None, *words: str, behind: int = 2) -> Any:
    """Run a command of the user's; ``Refused``: what it said."""
    code, answer, messages = await asyncio.to_thread(kes, source, *words, behind=behind)
    if code:
        raise Refused(messages or str(answer))
    return answer


class Heard(logging.Handler):
    """The warnings of the toolkit: a source that waits for a right says so, and goes on when it is given."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


# -- what the administrator does before --------------------------------------------------------------------------------


async def nothing(office: Office, kes: Kes) -> None:
    await office.lab.create()


async def all_topics(office: Office, kes: Kes) -> None:
    """The topics of a source, made by the administrator."""
    lab = office.lab
    await lab.create()
    await run(kes, lab.telling(), "topics", "apply")


async def has_run(office: Office, kes: Kes) -> None:
    """A source that has handled an event, and has a dead letter of another one."""
    await office.lab.create()
    source = picky(office.lab.source())
    await office.lab.add("a")
    await office.lab.add("b", deed="x")
    async with Running(source) as running:
        await running.until_handled(2)


async def has_more(office: Office, kes: Kes) -> None:
    """The same, and a record that is not handled yet."""
    await has_run(office, kes)
    await office.lab.add("c")


async def is_ahead(office: Office, kes: Kes) -> None:
    """The same, and the group's offset is ahead of the changelog's."""
    await has_more(office, kes)
    with GroupChecks(office.lab.config().resolved()) as checks:
        await asyncio.to_thread(checks.set_offsets, {0: 3})


async def is_restored(office: Office, kes: Kes) -> None:
    """A source that has run, whose state belongs to a topic with another id."""
    await has_run(office, kes)

    def write() -> None:
        with GroupChecks(office.lab.config().resolved()) as checks:
            record = decode_offset(checks.last_records(office.lab.changelog, [0], OFFSET_KEY)[0])
            other = msgspec.structs.replace(record, source_id="AAAAAAAAAAAAAAAAAAAAAQ")
            checks.write(office.lab.changelog, OFFSET_KEY, {0: msgspec.json.encode(other)})

    await asyncio.to_thread(write)


async def hangs(office: Office, kes: Kes) -> None:
    """The changelog has a transaction that nobody ends."""
    await has_run(office, kes)
    client = WireClient(office.lab.bootstrap, "test")
    client.start()
    try:
        offset = await asyncio.to_thread(leave_hanging, client, office.lab.changelog)
    finally:
        client.close(2.0)
    office.names["OFFSET"] = str(offset)


def picky(source: EventSource[Totals], is_broken: bool = True) -> EventSource[Totals]:
    def work(ctx: EventContext[Totals], event: Added) -> None:
        if event.deed == "x" and is_broken:
            raise ValueError("no")
        count(ctx, event)

    source.register_event_type(Added, work, on_error=DEAD_LETTER)
    return source


# -- the table ---------------------------------------------------------------------------------------------------------

SOURCE = (
    "Read topic SOURCE",
    "DescribeConfigs topic SOURCE",
    "Read topic CHANGELOG",
    "Write topic CHANGELOG",
    "DescribeConfigs topic CHANGELOG",
    "Write topic DEAD_LETTERS",
    "DescribeConfigs topic DEAD_LETTERS",
    "Read group GROUP",
    "Write transactional-id GROUP.*",
)
OUTPUT = "Write topic OUTPUT"


@feature(
    "an event source, its topics made before (`kes topics apply` by an administrator)",
    *SOURCE,
    OUTPUT,
    prepare=all_topics,
)
async def event_source(office: Office, kes: Kes) -> None:
    await office.lab.add("a", "b")
    async with Running(office.source()) as running:
        await running.until_handled(2)
    await office.lab.add("a")
    async with Running(office.source()) as running:  # which restores
        await running.until_handled(3)


async def handles_one(office: Office, **settings: Any) -> None:
    await office.lab.add("a")
    async with Running(picky(office.lab.source(**settings))) as running:
        await running.until_handled(1)


@feature(
    "an event source that makes its topics",
    *SOURCE,
    "Create topic CHANGELOG",
    "Create topic DEAD_LETTERS",
    prepare=nothing,
)
async def making_topics(office: Office, kes: Kes) -> None:
    await handles_one(office, **office.user)


@feature("timers and async jobs", *SOURCE, prepare=all_topics)
async def timers_and_jobs(office: Office, kes: Kes) -> None:
    source = office.lab.source(**office.user)

    async def job(event: Added) -> str:
        return event.name

    def done(ctx: EventContext[Totals], event: Added, name: str) -> None:
        ctx.schedule_in(timedelta(milliseconds=1), Ring(name), name="t")

    rung: list[str] = []
    jobs = AsyncJobScheduler(source, job, done)
    jobs.register_event_type(Added, key=lambda event: event.name)
    source.register_event_type(Ring, lambda ctx, event: rung.append(event.name))
    await office.lab.add("a")
    async with Running(source) as running:
        await running.until(lambda: rung, "the timer rings")
        await running.until_handled(1)


@feature("dead letters of a source", *SOURCE, prepare=all_topics)
async def dead_letters(office: Office, kes: Kes) -> None:
    await office.lab.add("a", deed="x")
    async with Running(picky(office.lab.source(**office.user))) as running:
        await running.until_handled(1)
    assert len(await office.lab.dead_letters()) == 1


@feature("moves and replicas", *SOURCE, OUTPUT, prepare=all_topics, partitions=2)
async def moves(office: Office, kes: Kes) -> None:
    async with AsyncExitStack() as members:
        first, second = (Running(office.source(num_standbys=1), active=0) for _ in range(2))
        await members.enter_async_context(first)
        await first.until(lambda: first.active == 2, "it has everything")
        await members.enter_async_context(second)
        await until(lambda: first.active == second.active == 1, "the partitions are shared")
        await until(lambda: first.ready and second.ready, "the copies are warm")
        await office.lab.add("a", "b")
        await office.lab.add("c", partition=1)


@feature("notes of members for `kes group`", *SOURCE, "Read group GROUP.*", prepare=all_topics)
async def notes(office: Office, kes: Kes) -> None:
    async with Running(picky(office.lab.source(**office.user))) as running:
        await until_noted(office, running)


async def until_noted(office: Office, running: Running) -> None:
    """Wait until a member has published notes as a member of the group."""
    instance = running.source.config.instance_id
    with closing(StatusBoard(office.lab.bootstrap, "test", PLAINTEXT, office.lab.group)) as board:

        def is_noted() -> bool:
            notes = board.read([instance], 5.0).get(instance, {})
            return any(running.source.member_id in note.text for note in notes.values())

        await running.until(is_noted, "its notes are there")


@feature("`EventProducer`", OUTPUT, prepare=nothing)
async def event_producer(office: Office, kes: Kes) -> None:
    async with EventProducer(**office.user, delivery_timeout_seconds=5) as producer:
        await producer.send(office.lab.output, Total("a", 1), key="a")


@feature("`EventProducer` with transactions", OUTPUT, "Write transactional-id ID", prepare=nothing)
async def transactional_producer(office: Office, kes: Kes) -> None:
    async with (
        EventProducer(**office.user, transactional_id=office.names["ID"], delivery_timeout_seconds=5) as producer,
        producer.transaction() as transaction,
    ):
        transaction.send(office.lab.output, Total("a", 1), key="a")


@feature("`GlobalChangeLog`, `View`", "Read topic SOURCE", prepare=nothing)
async def global_change_log(office: Office, kes: Kes) -> None:
    log = GlobalChangeLog(office.lab.topic, **office.user)
    log.table(key=str, value=Added)
    async with log:
        await log.wait_caught_up(timeout_seconds=10)


def _repaired(office: Office) -> EventSource[Totals]:
    return picky(office.lab.source(**office.user), is_broken=False)


def command(
    *words: str,
    rights: Sequence[str],
    also: Sequence[str] = (),
    prepare: Use = has_run,
    behind: int = 2,
    name: str = "",
    source: Callable[[Office], EventSource[Any]] = _repaired,
) -> None:
    """A row for a command. ``name``: what the table says, if not its words."""

    shown = " ".join(word for word in words if word.islower() and word[0] != "-")

    @feature(name or f"`kes {shown}`", *rights, prepare=prepare, also=also)
    async def use(office: Office, kes: Kes) -> None:
        arguments = [office.names.get(word, word) for word in words]
        await run(kes, source(office), *arguments, behind=behind)


def commands(name: str, *lines: str, rights: Sequence[str], also: Sequence[str] = (), prepare: Use = has_run) -> None:
    """A row for several commands that need the same rights. Each of them is refused without one."""

    @feature(name, *rights, prepare=prepare, also=also)
    async def use(office: Office, kes: Kes) -> None:
        named = [[office.names.get(word, word) for word in line.split()] for line in lines]
        await each(*(run(kes, _repaired(office), *words) for words in named))


async def each(*uses: Awaitable[Any]) -> None:
    """Await all, one after the other. Raises ``Refused`` if all are."""
    refused = []
    for use in uses:
        try:
            await use
        except Refused as error:
            refused.append(str(error))
    if refused:
        raise Refused(str(refused)) if len(refused) == len(uses) else AssertionError(f"only these: {refused}")


POSITION = ("Read topic SOURCE", "Read topic CHANGELOG", "Read group GROUP")


def rows() -> list[str]:
    """The table as the page of the documentation has it."""
    first, *_ = FEATURES.values()
    lines = []
    for name, row in FEATURES.items():
        is_source = row is not first and set(SOURCE) <= set(row.rights)
        rights = [right for right in row.rights if not (is_source and right in first.rights)]
        cells = ["as the first row"] * is_source + [*map(_shown, rights)]
        cells += [f"{_shown(right)}: what is hidden looks as if no coordinator had it" for right in row.also]
        lines.append(f"| {name} | {'; '.join(cells)} |")
    return lines


def _shown(text: str) -> str:
    operation, kind, *name = text.split()
    plural = " with the prefix" if name and name[0].endswith(".*") else ""
    words = f"{operation} on {kind.replace('-', ' ')}{'s' if plural else ''}{plural}"
    named = "".join(name).removesuffix(".*") + ("." if plural else "")
    return f"{words} `{named}`" if name else words.replace("on cluster", "on the cluster")
