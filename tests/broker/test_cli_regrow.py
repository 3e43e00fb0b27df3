"""``kes topics regrow`` beside a real broker: all of a state in more partitions, and kills at each step."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from streams import EventSource
from streams.cli import regrow
from streams.errors import TopicError
from streams.kafka.questions.group_checks import GroupChecks
from streams.model.partitioners import partition_of
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.settings import StateConfig
from tests.broker.engine_kit import Lab, Running, start_failure
from tests.broker.regrow_program import MINUTE_MS, build
from tests.unit.waiting import PATIENCE
from tests.vocabulary import ADDED, added

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(240)]

PARTITIONS = 4
AFTER = 10
PROGRAM = Path(__file__).with_name("regrow_program.py")
Kes = Callable[..., tuple[int, Any, str]]
FEW = ("after grow 1", "after send 2", "before commit", "after commit", "after grow 2", "before set_offsets")
ALL = (
    *(f"{when} {name}" for name in ("open", "grow 1", "hold", "send 1", "send 2") for when in ("before", "after")),
    *("after send 4", "after send 5", "before commit", "within commit 2", "after commit"),
    *(f"{when} {name}" for name in ("grow 1", "grow 2") for when in ("before", "after")),
    *("before set_offsets", "after set_offsets"),
)


class Story:
    """Events of random keys, whose times only go on, and the fold of all of them from the start."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab, self._random = lab, random.Random(seed)
        self._now_ms = (int(time.time() * 1000) - 40 * MINUTE_MS) // MINUTE_MS * MINUTE_MS
        self.totals: Counter[str] = Counter()
        self.windows: Counter[str] = Counter()
        self.latest: dict[str, int] = {}
        self.rings: set[str] = set()
        self.told: list[tuple[str, int]] = []  # what each event sends
        self.ends: dict[int, int] = {}

    async def tell(self, events: int, partitions: int, *, due_ms: int = 0) -> None:
        """Send events to the partitions of their keys. ``due_ms``: when the timers that they set are due."""
        for _ in range(events):
            name = f"key-{self._random.randrange(120)}"
            self._now_ms += self._random.randrange(2000)
            await self._send(name, self._random.randrange(1, 9), partition_of(name, partitions), due_ms)
        await self._lab.flush()

    async def close(self, partitions: int) -> None:
        """Send an event to each partition that closes all windows before it."""
        self._now_ms += 5 * MINUTE_MS
        for number in range(partitions):
            name = next(n for n in map(str, range(10_000)) if partition_of(n, partitions) == number)
            await self._send(name, 1, number, 0, is_last=True)
        await self._lab.flush()

    async def _send(self, name: str, amount: int, number: int, due_ms: int, *, is_last: bool = False) -> None:
        lab: Any = self._lab
        is_set = due_ms and name not in self.rings and self._random.random() < 0.3
        deed = str(due_ms) if is_set else ""
        self.rings |= {name} if is_set else set()
        record = added(name, amount, deed), name.encode(), number, lab._on_delivery
        lab._producer.produce(lab.topic, *record, timestamp=self._now_ms, headers=ADDED)
        self.totals[name] += amount
        self.latest[name] = amount
        if not is_last:
            self.windows[f"{name}@{self._now_ms // MINUTE_MS}"] += amount
        self.told.append((name, self.totals[name]))
        self.ends[number] = self.ends.get(number, 0) + 1

    def handled(self, partitions: int) -> list[int]:
        return [self.ends.get(number, 0) for number in range(partitions)]


def source_of(lab: Lab, partitions: int, **settings: Any) -> EventSource[Any]:
    return build(lab.config(num_partitions=partitions, **settings), lab.output)


async def check(lab: Lab, story: Story, partitions: int) -> None:
    """No key is lost, doubled, or in two partitions; totals, windows and timers are those of the fold."""
    stores = [await lab.state(number) for number in range(partitions)]
    found: Counter[str] = Counter()
    for number, entries in enumerate(stores):
        names = [key.split(b"\0", 1)[1].decode() for key in entries if key.startswith(b"\xfetotals\0")]
        assert {partition_of(name, partitions) for name in names} <= {number}
        found.update(names)
    assert set(found.values()) == {1}
    assert found.keys() == story.totals.keys()
    sent = await lab.totals()
    plain = [one for one in sent if not one[0].endswith("!") and "@" not in one[0]]
    assert sorted(plain) == sorted(story.told), "each event once, on the total of all before it"
    assert sorted(one for one in sent if "@" in one[0]) == sorted(story.windows.items()), "each window once, whole"
    assert sorted(one for one in sent if one[0].endswith("!")) == sorted((f"{name}!", 1) for name in story.rings)


async def killed(lab: Lab, step: str, *words: str) -> Any:
    """Run the command in a process that dies at a step; its answer, if it came to one."""
    program = [sys.executable, str(PROGRAM), lab.bootstrap, lab.group, lab.topic, lab.output, str(PARTITIONS), step]
    program += ["--partitions", str(AFTER), "--still", "0", *words]
    ended = await asyncio.to_thread(subprocess.run, program, capture_output=True, text=True, timeout=90)
    assert ended.returncode in (0, -signal.SIGKILL), (step, ended.stderr)
    return json.loads(ended.stdout) if ended.returncode == 0 else None


async def regrown(lab: Lab, steps: tuple[str, ...], folder: Path, seed: int = 1) -> None:
    """Grow in the midst of a story, killed at these steps; the state is on disk before and after."""
    story, state = Story(lab, seed), StateConfig(folder=str(folder), checkpoint_bytes=1)
    await lab.create()
    due_ms = int(time.time() * 1000) + 20_000
    await story.tell(600, PARTITIONS, due_ms=due_ms)
    async with Running(source_of(lab, PARTITIONS, state=state)) as running:
        await running.until_handled(*story.handled(PARTITIONS))
    ended = [step for step in steps if await killed(lab, step) is not None]
    assert ended == [] or steps is ALL, "each of the few is one that the command comes to"
    answer = await killed(lab, "")
    assert answer["before"] == PARTITIONS
    again = await killed(lab, "")
    assert (again["moved"], again["steps"]) == (False, {})
    error = await start_failure(source_of(lab, PARTITIONS, state=state))
    assert isinstance(error, TopicError), error
    assert f"has {AFTER} partitions, settings say {PARTITIONS}" in str(error)
    assert "set num_partitions" in str(error)
    await asyncio.to_thread(lab._producer.list_topics, lab.topic, PATIENCE)  # it learns of the new partitions
    await story.tell(600, AFTER, due_ms=due_ms)
    await story.close(AFTER)
    async with Running(source_of(lab, AFTER, state=state)) as running:
        await running.until_handled(*story.handled(AFTER))
        await lab.until_outputs(len(story.told) + len(story.windows) + len(story.rings), 3 * PATIENCE)
    await check(lab, story, AFTER)
    await lab.check_settled()


async def test_killed_on_the_way_it_goes_on_and_no_key_is_lost(lab: Lab, tmp_path: Path) -> None:
    """Until it is done, neither the old settings nor the new ones start."""
    await regrown(lab, FEW, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2, 4))
async def test_killed_at_any_step(lab: Lab, tmp_path: Path, seed: int) -> None:
    await regrown(lab, ALL, tmp_path, seed)


async def handled(lab: Lab, events: int = 40) -> EventSource[Any]:
    """A source that has handled so many events, and has stopped."""
    await lab.create()
    story = Story(lab, 1)
    await story.tell(events, PARTITIONS)
    async with Running(source := source_of(lab, PARTITIONS)) as running:
        await running.until_handled(*story.handled(PARTITIONS))
    return source


async def test_a_producer_that_goes_on_is_named(lab: Lab, kes: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the state moves it is refused. Behind that all is done, and the first record is named."""
    source, late = await handled(lab), partition_of("late", PARTITIONS)
    end = (await lab.watermarks(lab.topic))[late].end

    def produce(*_: object) -> None:
        producer: Any = lab._producer
        producer.produce(lab.topic, added("late"), b"late", late, headers=ADDED)
        assert producer.flush(PATIENCE) == 0

    async def run(still: str = "0") -> tuple[int, Any, str]:
        words = ("--partitions", str(AFTER), "--still", still, "--yes")
        code, answer, err = await asyncio.to_thread(kes, source, "topics", "regrow", *words)
        return code, answer, " ".join(err.split())

    monkeypatch.setattr(regrow, "time", SimpleNamespace(sleep=produce, time=time.time))
    code, _, err = await run("1")
    assert (code, f"{lab.topic}[{late}] has grown from {end} to {end + 1}: stop its producers" in err) == (1, True), err
    async with Running(source_of(lab, PARTITIONS)) as running:
        await running.until_committed(1)
    move: Any = regrow._Regrow.move

    def moved(command: Any, slot: Any) -> None:
        move(command, slot)
        produce()

    monkeypatch.setattr(regrow._Regrow, "move", moved)
    code, answer, err = await run()
    assert (code, f"the first record is {lab.topic}[{late}]@{end + 1}" in err) == (1, True), err
    assert answer["moved"]
    code, answer, err = await run()
    assert (code, answer and answer["steps"]) == (0, {}), err
    assert await lab.committed() == {n: (await lab.changelog_offset(n)) for n in range(AFTER)}


async def test_a_member_that_runs_in_between_is_seen(lab: Lab, kes: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the offsets are pending the positions must be those of the look. Nothing is moved, and a repetition is."""
    source = await handled(lab)
    before = [await lab.state(number) for number in range(PARTITIONS)]
    look: Any = regrow._Regrow.look

    def looked(command: Any, still: float) -> None:
        look(command, still)
        with GroupChecks(lab.config().resolved()) as checks:
            record = decode_offset(checks.last_records(lab.changelog, [0], OFFSET_KEY)[0])
            checks.write(
                lab.changelog, OFFSET_KEY, {0: msgspec.json.encode(msgspec.structs.replace(record, serial=99))}
            )

    words = ("topics", "regrow", "--partitions", str(AFTER), "--still", "0", "--yes")
    with monkeypatch.context() as patch:
        patch.setattr(regrow._Regrow, "look", looked)
        code, _, err = await asyncio.to_thread(kes, source, *words)
    assert (code, "has run meanwhile; run it again" in " ".join(err.split())) == (1, True), err
    assert [await lab.state(number) for number in range(PARTITIONS)] == before
    code, answer, err = await asyncio.to_thread(kes, source, *words)
    assert (code, answer and answer["moved"]) == (0, True), err
    await lab.check_settled()


async def test_what_has_to_stand_still(lab: Lab, kes: Kes) -> None:
    """Living members, records that are not handled, and a start in the middle of it are refused by name."""
    await lab.create()
    story, source = Story(lab, 1), source_of(lab, PARTITIONS)
    await story.tell(40, PARTITIONS)

    async def run(*words: str) -> tuple[int, Any, str]:
        words = ("--partitions", str(AFTER), "--still", "0", "--yes", *words)
        code, answer, err = await asyncio.to_thread(kes, source, "topics", "regrow", *words)
        return code, answer, " ".join(err.split())

    async with Running(source) as running:
        await running.until_handled(*story.handled(PARTITIONS))
        code, _, err = await run()
        assert (code, "is alive (member-" in err) == (1, True), err
    await lab.add("late", partition=(late := partition_of("late", PARTITIONS)))
    code, _, err = await run()
    where = f"{lab.topic}[{late}]@{story.ends.get(late, 0)}"
    assert (code, f"records are not handled yet: from {where} on" in err) == (1, True), err
    story.ends[late] = story.ends.get(late, 0) + 1
    async with Running(source := source_of(lab, PARTITIONS)) as running:
        await running.until_handled(*story.handled(PARTITIONS))
    code, answer, err = await run("--dry-run")
    assert (code, answer and answer["moved"], answer and answer["dry_run"]) == (0, False, True), err
    assert sum(row["come"] for row in answer["state"]) == sum(row["go"] for row in answer["state"]) > 0
    assert await killed(lab, "before commit") is None
    for partitions in (PARTITIONS, AFTER):
        error = await start_failure(source_of(lab, partitions))
        assert isinstance(error, TopicError), error
        assert "if that command was interrupted, run it again" in str(error)
    code, answer, err = await run()
    assert (code, answer and answer["moved"]) == (0, True), err
    assert answer["next"].startswith(f"set num_partitions={AFTER}")
    shown = (await asyncio.to_thread(kes, source_of(lab, AFTER), "state", "ls"))[1]["partitions"]
    assert {row["begun"].split(":")[0] for row in shown} == {f"grown from {PARTITIONS} to {AFTER} partitions"}
