"""Journals: a log in Kafka that one process at a time can write, and any number can follow.

journal = Journal("ledger", [Transferred], bootstrap_servers="localhost:9092")
async with journal.lead() as term:  # waits; the block is cancelled when the term ends
    position = await term.append(Transferred("a", "b", 5))
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from typing import Any, Final, NamedTuple, TypeVar

from streams.errors import ConfigError, NotLeading, OffsetError, TopicError, TopicReplaced
from streams.journal.entries import EntryTypes
from streams.journal.reader import JournalReader
from streams.journal.term import JournalTerm
from streams.journal.writer import TermWriter
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.model.topics import TopicSpec, missing
from streams.records import DEFAULT_MESSAGE_LIMIT
from streams.runtime.bridge import Worker
from streams.runtime.claim import Claim
from streams.runtime.ownership.candidate import Candidate
from streams.runtime.ownership.tenure import SESSION_SECONDS, GroupTenures, Tenure, TenureOwner, remove_dead_member
from streams.settings.sources import bootstrap_servers as named_servers
from streams.settings.sources import joined_client_settings

T = TypeVar("T")

_CLAIM_SECONDS: Final = 10.0
_BATCH_OVERHEAD: Final = 200
"""Bytes that a record batch may have beside its records, generously."""


class JournalTopic(NamedTuple):
    """The topic of a journal as it is: its id, where the log begins and ends, the bytes of the largest entry."""

    topic_id: str
    start: int
    end: int
    entry_limit: int


class Journal:
    """A journal: the topic ``name``, with one partition. Any thread; it holds no connection.

    ``events``: the classes of its entries (``bytes`` may be one). ``bootstrap_servers`` (else
    ``KES_BOOTSTRAP_SERVERS``) and ``client_settings`` are as those of ``EventSourceConfig``. The topic must have
    ``replication_factor`` and ``min_insync_replicas`` as they are here, and keep everything (``create`` makes it so):
    it is checked at each start. ``session_seconds``: a leader that is killed is replaced after it. Raises
    ``ConfigError``, ``RegistrationError``.
    """

    def __init__(
        self,
        name: str,
        events: Iterable[type] = (bytes,),
        *,
        bootstrap_servers: str = "",
        client_settings: Mapping[str, Any] | None = None,
        replication_factor: int = 3,
        min_insync_replicas: int = 2,
        session_seconds: float = SESSION_SECONDS,
    ) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name):
            raise ConfigError(f"the name of a journal is {name!r}; use letters, digits, '.', '_', '-', at most 200")
        if not 1 <= min_insync_replicas <= replication_factor:
            raise ConfigError(
                f"min_insync_replicas is {min_insync_replicas}; it must be from 1 to replication_factor, which is "
                f"{replication_factor}"
            )
        if not 1.0 <= session_seconds <= 1_800:
            raise ConfigError(f"session_seconds is {session_seconds!r}; it must be from 1 to 1800")
        self.name = name
        self.types = EntryTypes(events)
        self.session_seconds = session_seconds
        self.spec = TopicSpec(
            name=name,
            partitions=1,
            replication_factor=replication_factor,
            configs={
                "cleanup.policy": "delete",
                "retention.ms": "-1",
                "retention.bytes": "-1",
                "min.insync.replicas": str(min_insync_replicas),
                "unclean.leader.election.enable": "false",
            },
        )
        self.settings = ClientSettings(
            named_servers(bootstrap_servers), joined_client_settings(client_settings), client_id=f"kes-{name}"
        )

    async def create(self) -> bool:
        """Make the topic if it is missing; returns whether it was made. Raises as ``check``."""
        return await self._on_thread(self.create_now)

    async def check(self) -> JournalTopic:
        """Look at the topic. Raises ``TopicError`` (it is missing, or could lose entries), ``BrokerUnavailable``."""
        return await self._on_thread(self.check_now)

    def create_now(self) -> bool:
        """``create`` for programs without an event loop. Blocks."""
        with closing(TopicAdmin(self.settings)) as admin:
            made = admin.create([self.spec])
        self.check_now()
        return bool(made)

    def check_now(self) -> JournalTopic:
        """``check`` for programs without an event loop. Blocks."""
        with closing(TopicAdmin(self.settings)) as admin:
            found = admin.describe([self.name])[self.name]
            if found is None:
                raise TopicError(f"{missing(self.name)}: `await journal.create()` makes it")
            if differences := admin.differences([self.spec]):
                raise TopicError(
                    f"{'; '.join(differences)}. A journal could lose entries so: nothing is read or written"
                )
            mark = admin.watermarks(self.name, [0])[0]
        own = int(str(self.settings.overrides.get("message.max.bytes") or DEFAULT_MESSAGE_LIMIT))
        limit = min(own, int(found.configs.get("max.message.bytes", own)) - _BATCH_OVERHEAD)
        return JournalTopic(found.topic_id, mark.start, mark.end, limit)

    @asynccontextmanager
    async def reader(self, *, after: int | None = None, topic_id: str = "") -> AsyncIterator[JournalReader]:
        """Open a reader of what is behind a position; without one, of all entries.

        ``topic_id``: of the topic that the position belongs to (``JournalTopic.topic_id``). Raises ``OffsetError``
        where entries are missing that this reader needs, or the position is none of this log; and as ``check``.
        """
        topic = await self.check()
        position = self._start(topic, after, topic_id)
        reader = JournalReader(self.settings, self.name, self.types, position)
        try:
            yield reader
        finally:
            await reader.close()

    async def remove_member(self, member_id: str, timeout_seconds: float = 10.0) -> bool:
        """Take a process *that is known to be dead* out of the group, so that another one leads at once, and not only
        when the session of the dead one ends; for the program that has started it.

        ``member_id``: that of its ``Candidate`` or ``Replicated``. ``False``: it was not in the group any more. One
        that lives does no harm: its term is over, and it stands again. Raises ``BrokerUnavailable``, ``ConfigError``.
        """
        group = f"{self.name}.leader"
        return await self._on_thread(
            lambda: remove_dead_member(self.settings, group, self.name, member_id, timeout_seconds)
        )

    def candidate(self) -> Candidate:
        """Make the candidate of one ``lead``, for those who want to know its ``member_id``."""
        return Candidate(f"{self.name}.leader", self.session_seconds)

    @asynccontextmanager
    async def lead(
        self, *, address: str = "", is_strict: bool = False, candidate: Candidate | None = None
    ) -> AsyncIterator[JournalTerm]:
        """Stand for the leadership, wait for it, and begin a term, for the time of the block.

        When the term ends before the block does (another leader, a group or broker that does not answer for
        ``session_seconds``), the block is cancelled, and ``NotLeading`` is raised; a log that is damaged raises its own
        error. Leaving the block settles the appends that are under way, and hands over at once.

        What was appended before the term is known by a reader: ``catch_up`` within the block has all of it. Raises as
        ``check``, ``MembershipFatal`` and ``ConfigError`` if the group refuses this process. ``address``: where this
        leader is reached, for readers (``TermBegan.address``). ``is_strict``: see ``JournalTerm``. ``candidate``: a new
        one of ``candidate()``.
        """
        await self.check()
        candidate = candidate or self.candidate()

        def begin(claim: Claim, tenure: Tenure) -> JournalTerm:
            writer = TermWriter(claim, tenure)
            writer.begin(address)
            return JournalTerm(self.name, writer, self.types, is_strict=is_strict)

        await candidate.open(self._connect)
        term: JournalTerm | None = None
        try:
            async with candidate.term(begin) as term:
                term.start(candidate.claims, candidate.end_term)
                try:
                    yield term
                finally:
                    await term.close()
        except NotLeading as error:
            if term is not None and term.failure is not None:
                raise term.failure from error
            raise
        finally:
            await candidate.close()

    def _connect(self, owner: TenureOwner) -> tuple[Claim, GroupTenures]:
        group = GroupTenures.connect(
            self.settings, f"{self.name}.leader", self.name, 1, owner, session_seconds=self.session_seconds
        )
        return self.claim(), group

    def claim(self) -> Claim:
        """Make the claim of the journal's writer."""
        identity, seconds = f"{self.name}.writer", _CLAIM_SECONDS
        return Claim(self.settings, identity, self.name, transaction_seconds=seconds, call_seconds=seconds)

    def _start(self, topic: JournalTopic, after: int | None, topic_id: str) -> int:
        if topic_id and topic_id != topic.topic_id:
            raise TopicReplaced(
                f"the position {after} belongs to a topic {self.name} with the id {topic_id}, and this one has the id "
                f"{topic.topic_id}: it was recreated, or another cluster answers"
            )
        if after is None and topic.start > 0:
            raise OffsetError(
                f"{self.name}[0] begins at {topic.start}: entries before it were trimmed. Load a snapshot, and read "
                "behind its position: reader(after=...)"
            )
        position = 0 if after is None else after
        if not topic.start <= position <= topic.end:
            raise OffsetError(
                f"position {position} is not in {self.name}[0], which has {topic.start} to {topic.end}: "
                + ("entries that are needed were trimmed" if position < topic.start else "the log has lost entries")
            )
        return position

    async def _on_thread(self, function: Callable[[], T]) -> T:
        worker = Worker(f"kes-{self.name}-look")
        try:
            return await worker.call(function)
        finally:
            worker.abandon()
