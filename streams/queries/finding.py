"""The members of a group that answer queries: found by the group and their status notes, for all questions together."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from streams.errors import BrokerUnavailable
from streams.kafka.group.status_board import StatusBoard
from streams.kafka.questions.group_view import GroupQuestions
from streams.kafka.wire.security import Security
from streams.queries.routing import Server, candidates, servers_of
from streams.settings.config import EventSourceConfig

SECONDS_BETWEEN_READS: Final = 0.5
"""Between two checks of the group."""
SILENT_SECONDS: Final = 5.0
"""A member that has not answered comes behind all others for so long, unless it answers meanwhile."""


class MemberFinder:
    """Knows the members of one group. On one loop."""

    def __init__(self, config: EventSourceConfig) -> None:
        security = Security.of(config.client_settings)
        self._config = config
        self._questions = GroupQuestions(config.bootstrap_servers, security)
        self._board = StatusBoard(config.bootstrap_servers, "kes-reader", security, config.group_id)
        self.found: tuple[Server, ...] = ()
        self._read_at = float("-inf")
        self._reading: asyncio.Task[tuple[Server, ...]] | None = None
        self._silent: dict[str, float] = {}
        """Addresses that have not answered, and until when that counts."""

    async def close(self) -> None:
        """End, after a read that is under way."""
        if self._reading is not None:
            await asyncio.wait([self._reading])
        await asyncio.to_thread(self._board.close)
        await asyncio.to_thread(self._questions.close)

    async def candidates(self, partition: int, seconds: float, *, copies: bool, silent_last: bool) -> list[Server]:
        """Return the members to ask about a partition; see ``routing.candidates``. Raises ``BrokerUnavailable`` when
        the group could not be looked at within ``seconds``."""
        servers = self.found or await self.refresh(seconds)
        now = time.monotonic()
        silent = {address for address, until in self._silent.items() if until > now} if silent_last else ()
        return candidates(servers, partition, copies=copies, silent=silent)

    def forget(self) -> None:
        """Have the next question read the group again."""
        self.found = ()

    def note_silence(self, server: Server) -> None:
        """Note that a member does not answer."""
        self._silent[server.address] = time.monotonic() + SILENT_SECONDS

    def note_answer(self, server: Server) -> None:
        """Note that a member has answered."""
        self._silent.pop(server.address, None)

    async def refresh(self, seconds: float) -> tuple[Server, ...]:
        """Read the group, together with all who want that now; at most twice a second. Raises as ``candidates``."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            reading = self._reading
            is_own = reading is None or reading.done()
            if reading is None or is_own:
                self._reading = reading = asyncio.create_task(self._refresh(max(left, 1.0)))
                reading.add_done_callback(lambda task: task.cancelled() or task.exception())  # its callers may be gone
            await asyncio.wait([reading], timeout=left)
            if reading.done() and (is_own or reading.exception() is None):
                return reading.result()
            # It takes longer, or it had less time than this one.
        raise BrokerUnavailable(f"the group {self._config.group_id} could not be looked at within {seconds:.3g} s")

    async def _refresh(self, seconds: float) -> tuple[Server, ...]:
        await asyncio.sleep(max(0.0, self._read_at + SECONDS_BETWEEN_READS - time.monotonic()))
        self._read_at = time.monotonic()
        self.found = await asyncio.to_thread(self._read_group, seconds)
        return self.found

    def _read_group(self, seconds: float) -> tuple[Server, ...]:
        """Describe the group, and read the notes of its members. Blocks."""
        config, deadline = self._config, time.monotonic() + seconds
        view = self._questions.describe_group(config.group_id, seconds)
        instances = [member.instance for member in view.members if member.instance]
        notes = self._board.read(instances, deadline - time.monotonic(), config.offsets_topic)
        texts = {
            instance: found[config.offsets_topic, 0].text
            for instance, found in notes.items()
            if (config.offsets_topic, 0) in found
        }
        return servers_of(view, texts, config.topic)
