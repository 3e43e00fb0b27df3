"""Commands over random histories, against what their callers learn.

Several clients ask, again and again until they know, under ids that some of them share; members die, leave, freeze and
come back, commits are aborted and their answers lost. At the end each id has had one effect, or none if it was turned
down; all its callers have the same answer; an answer was committed when it was given; versions are without gap.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from streams import PARK
from streams.core.commands import CommandRules, content_of
from streams.errors import IdReused, MembershipLost, NotOwned, Rejected, StreamsError, VersionConflict
from streams.model.answers import Answer
from streams.records import IncomingRecord
from streams.runtime.queries import commands
from streams.runtime.queries.commands import CommandQuestion
from streams.runtime.queries.local import LocalQueries
from streams.source import aggregates
from streams.testing import TestDriver, Unsettled
from streams.testing.simulation.virtual_time import elapse
from tests.broker.gate import nightly
from tests.property.kit import trouble
from tests.simulation.member_safeguards import edited_text
from tests.unit import test_commands as unit
from tests.unit.commands_kit import OUT, Move, Moved, Purse, build, gapless

pytestmark = pytest.mark.usefixtures("quiet")

KEYS = ("bob", "ada", "cid", "dan")
"""By the parity of an id: those of one partition."""


class CommandHistory:
    """What one seed decides. ``answers``: by id, what its callers have learnt; ``contents``: its first command."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"commands {seed}")
        self.is_broken = False
        source = build(deeds={"bad": self._bad}, on_error=PARK, num_standbys=1)
        self.driver: TestDriver[Any] = TestDriver(source, members=2, seed=seed, patience=120)
        rules = self.driver._world.command_rules
        assert rules is not None
        self.rules: CommandRules[Any] = rules
        self.answers: dict[str, list[Any]] = {}
        self.commands: dict[str, set[tuple[str, Move, int | None]]] = {}
        self.wrong: list[str] = []
        self.clients: set[asyncio.Task[None]] = set()

    def _bad(self, purse: Purse, command: Move) -> list[Moved]:
        if self.is_broken:
            raise RuntimeError("broken")
        return [Moved(command.cents)]

    def run(self, steps: int) -> None:
        with self.driver as driver:
            with suppress(Unsettled, MembershipLost, NotOwned):
                driver._run(self._live(steps))
            driver._run(self._heal())
            driver.settle(300)
            self.judge()

    async def _live(self, steps: int) -> None:
        driver, chance = self.driver, self.chance
        for number in range(steps):
            for _ in range(chance.choice((0, 1, 1, 3))):
                self._begin(f"{chance.randrange(number // 2 + 1, number + 3)}")
            what = chance.choice(("time",) * 6 + ("crash", "start", "start", "leave", "trouble", "break", "mend"))
            if what == "crash" and len(driver.members) > 1:
                driver.crash(chance.choice(driver.members))
            elif what == "start" and len(driver.members) < 3:
                driver._world.start(next(each for each in range(3) if each not in driver.members))
            elif what == "leave" and len(driver.members) > 1:
                driver.leave(chance.choice(driver.members))
            elif what == "trouble" and driver.members:
                trouble(driver, chance)
            elif what in ("break", "mend"):
                self.is_broken = what == "break"
            await elapse(chance.choice((0.001, 0.02, 0.3, 3.0)))

    async def _heal(self) -> None:
        """Have everything work, until each client knows."""
        driver, self.is_broken = self.driver, False
        for number in driver.members:
            driver.thaw(number)
        until, late = driver.now + 600, self.clients
        while late:
            if not driver.members:  # the last one may have been on its way out
                driver._world.start(0)
            _, late = await asyncio.wait(late, timeout=10)
            assert driver.now < until, f"{len(late)} clients know nothing after ten minutes"

    def _begin(self, id: str) -> None:
        chance = self.chance
        known = sorted(self.commands.get(id, ()), key=repr)
        if known and chance.random() < 0.8:  # the same one, once more
            key, command, expected = known[0]
        else:
            # An id is one id within its partition: so another command of it has the same key, or one beside it.
            key = chance.choice(KEYS[int(id) % 2 :: 2])
            cents, times = chance.choice((-7, -2, 1, 2, 3)), chance.choice((0, 1, 1, 2))
            command = Move(cents, times, chance.choice(("", "", "bad")))
            expected = chance.choice((None, None, None, chance.randrange(20)))
        self.commands.setdefault(id, set()).add((key, command, expected))
        client = asyncio.ensure_future(self._ask(id, key, command, expected))
        self.clients.add(client)

    async def _ask(self, id: str, key: str, command: Move, expected: int | None) -> None:
        """Ask as a client does that never gives up."""
        driver = self.driver
        record = self.rules.record("commands", command, key, id, expected)
        content = content_of(record.key, record.value, record.headers)
        while True:
            sent = driver.send_record(record, wait=False)
            deadline = driver.now + 8.0
            while driver.now < deadline:
                answer = await self._put(id, sent)
                if answer is not None and answer.kind in ("parked", "failed"):
                    break
                if answer is not None and answer.kind == "reply" and answer.reply is not None:
                    self._learn(id, key, answer, content)
                    return
                await elapse(0.05)
            await elapse(1.0)

    async def _put(self, id: str, sent: IncomingRecord) -> Any:
        """Ask the members in turn."""
        at = (sent.topic, sent.partition, sent.offset) if self.chance.random() < 0.5 else None
        for number in self.driver.members:
            source = self.driver._world.members[number].source
            question = CommandQuestion(
                group="purses", partition=sent.partition, id=id, key=sent.key or b"", at=at, timeout_seconds=5.0
            )
            with suppress(StreamsError):
                return await commands.answered(source._run.queries(), question)
        return None

    def _learn(self, id: str, key: str, answer: Any, content: bytes) -> None:
        try:
            found: Any = self.rules.done(answer.reply, content, {}, "")
            learnt: tuple[Any, ...] = ("done", found.version, found.count, found.events)
        except Rejected as error:
            learnt = ("rejected", answer.reply.version, str(error.data))
        except VersionConflict as error:
            learnt = ("conflict", error.version)
        except IdReused:
            learnt = ("reused",)
        self.answers.setdefault(id, []).append(learnt)
        there = self._decided(key)
        if learnt[0] != "reused" and there < answer.reply.version:
            self.wrong.append(f"{id} was answered with version {answer.reply.version}, and {there} are committed")

    def _decided(self, key: str) -> int:
        """Return how many events of a key are committed, also where the markers are not written yet."""
        logs = [log for log in self.driver._world.broker.logs.values() if log.topic == OUT]
        entries = [entry for log in logs for entry in log.entries if entry.key == key.encode()]
        return sum(entry.txn is None or bool(entry.txn.outcome) for entry in entries)

    def judge(self) -> None:
        """Compare what clients have learnt with what is there. An id's effects are those of one of its commands."""
        driver = self.driver
        driver.check()
        assert not self.wrong, self.wrong
        there, done = gapless(driver), 0
        for id, learnt in self.answers.items():
            real = {one for one in learnt if one[0] != "reused"}
            assert len(real) == 1, f"{id} has the answers {learnt}"
            assert ("reused",) not in learnt or len(self.commands[id]) > 1
            answer = next(iter(real))
            done += answer[2] if answer[0] == "done" else 0
        assert sum(there.values()) == done, "an id has not had one effect"


@pytest.mark.parametrize("seed", [*range(6), 270, *(nightly(seed) for seed in range(6, 300) if seed != 270)])
def test_any_history_of_commands_has_one_effect_and_one_answer_an_id(seed: int) -> None:
    CommandHistory(seed).run(40)


# -- the safeguards ----------------------------------------------------------------------------------------------------


async def _unproven(queries: LocalQueries, number: int, read: Callable[[Any], Any], *, timeout_seconds: float) -> Any:
    """Look without a turn, and answer without a proof."""
    worker = queries.engine.workers[number]
    return Answer(read(worker.store), number, queries.positions(worker), 0.0, "")


def history(seed: int) -> Callable[[], None]:
    return lambda: CommandHistory(seed).run(40)


SAFEGUARDS: dict[str, tuple[list[tuple[Any, str, str, str]], Callable[[], None]]] = {
    "a_reply_is_given_before_its_commit": (
        [(commands, "answered", "await queries.query(", "await _unproven(queries, ")],
        history(0),
    ),
    "a_reply_is_not_kept": (
        [(aggregates, "_handler", "keep_reply(ctx, encode_reply(handled.reply))", "pass")],
        unit.test_a_command_has_an_answer_an_effect_and_numbered_events,
    ),
    "an_id_stands_for_any_command": (
        [(CommandRules, "done", "reply.content != content", "False")],
        lambda: unit.test_an_id_of_another_command_has_no_effect(Move(6), "ada", None),
    ),
    "evolve_goes_on_from_what_decide_has_left": (
        [
            (
                CommandRules,
                "handle",
                "self.evolved(read(), events)",
                "self.evolved(before or Versioned(0, state), events)",
            )
        ],
        unit.test_what_decide_changes_in_its_state_is_lost,
    ),
    "the_version_is_not_compared": (
        [(CommandRules, "handle", "request.expected != version", "False")],
        unit.test_a_command_has_an_answer_an_effect_and_numbered_events,
    ),
    "a_command_on_its_way_has_failed": (
        [(commands, "_look", "not _passed(queries, worker, at)", "False"), (commands, "_passed", " > at[2]", " >= 0")],
        unit.test_a_question_without_an_answer_ends_in_time,
    ),
    "a_parked_command_has_failed": (
        [(commands, "_look", '"parked" if is_in_it', '"parked" if False')],
        unit.test_a_parked_command_takes_effect_when_its_key_goes_on,
    ),
    "any_command_of_a_parked_key_is_parked": (
        [(commands, "_look", "any((at[0], at[2]) == (one.topic, one.offset)", "any(True")],
        unit.test_a_failed_command_in_front_of_a_parked_one_is_told_apart,
    ),
    "versions_begin_anew": (
        [(aggregates, "_take_effect", "after.version - len(events) + 1", "1")],
        unit.test_other_handlers_apply_events_among_those_of_commands,
    ),
}


@pytest.mark.parametrize("name", SAFEGUARDS)
def test_each_safeguard_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edits, check = SAFEGUARDS[name]
    monkeypatch.setattr(commands, "_unproven", _unproven, raising=False)
    for owner, method, before, after in edits:
        monkeypatch.setattr(owner, method, edited_text(getattr(owner, method), before, after))
    with pytest.raises(BaseException):  # noqa: B017, PT011 - whatever finds it
        check()
