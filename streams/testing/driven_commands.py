"""Commands to a ``TestDriver``'s source, and their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streams.core.commands import content_of
from streams.errors import CommandFailed, ConfigError, NotKnown, NotOwned, Parked
from streams.model.commands import CommandDone
from streams.records import IncomingRecord, Record, TopicPartition
from streams.testing.driven_jobs import DrivenJobs


class DrivenCommands(DrivenJobs):
    """The part of ``TestDriver`` about commands."""

    if TYPE_CHECKING:

        def owner(self, partition: int) -> int | None: ...
        def send_record(self, record: Record, *, wait: bool = True) -> IncomingRecord: ...

    def ask(self, command: object, *, key: str | bytes, id: str, expected_version: int | None = None) -> CommandDone:
        """Send a command, run until everything is committed, and return what came of it, by the owner of its partition.
        Raises as ``CommandClient.ask``; ``NotKnown`` where no member works on the partition."""
        rules = self._world.command_rules
        if rules is None:
            raise ConfigError("this driver's source has no aggregate: it takes no commands")
        from streams.runtime.queries.commands import CommandQuestion, answered  # no run of a source loads it

        record = rules.record(self._world.config.topic, command, key, id, expected_version)
        sent = self.send_record(record)
        owner = self.owner(sent.partition)
        if owner is None:
            raise NotKnown(f"the command {id!r}: no member works on {sent.topic}[{sent.partition}]")
        queries = self._world.members[owner].source._run.queries()
        question = CommandQuestion(
            group=self._world.config.group_id,
            partition=sent.partition,
            id=id,
            key=sent.key or b"",
            at=(sent.topic, sent.partition, sent.offset),
        )
        try:
            answer = self._run(answered(queries, question))
        except NotOwned as error:
            raise NotKnown(f"the command {id!r}: {error}") from error
        if answer.kind == "parked":
            raise Parked(f"the command {id!r} waits in the queue of its key")
        if answer.kind == "failed":
            raise CommandFailed(f"the command {id!r} has failed, and its error policy let it go")
        if answer.reply is None:
            raise NotKnown(f"the command {id!r} has not had its turn")
        positions = {TopicPartition(topic, number): offset for topic, number, offset in answer.positions}
        content = content_of(record.key, record.value, record.headers)
        return rules.done(answer.reply, content, positions, answer.served_by)
