"""``kes reset`` beside a real broker: there and back, folders that read on, and kills at each step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streams.settings import StateConfig
from tests.broker.engine_kit import Lab, Running
from tests.broker.test_cli_start import killed

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]

PARTITIONS = 2
NAMES = "abcdefghij"
Kes = Callable[..., tuple[int, Any, str]]


async def test_a_topic_is_read_again_into_an_empty_state(lab: Lab, kes: Kes, tmp_path: Path) -> None:
    """A folder with the old state reads on over the deletions. Until a member has run, there is a way back."""
    await lab.create()
    await lab.add(*NAMES, "a")
    await lab.add(*"xyz", partition=1)
    folder, file = StateConfig(folder=str(tmp_path / "state"), checkpoint_bytes=1), str(tmp_path / "before.jsonl")
    source = lab.telling(state=folder)

    async def run(*words: str) -> tuple[int, Any, str]:
        code, answer, err = await asyncio.to_thread(kes, source, "reset", *words, "--yes", behind=1)
        return code, answer, " ".join(err.split())

    words = ("--to", "earliest", "--state", "drop", "--backup", file)
    async with Running(source) as running:
        await running.until_handled(11, 3)
        code, _, err = await run(*words)
        assert (code, "is alive (member-" in err) == (1, True), err
    before = await lab.state(0), await lab.state(1)
    assert len(before[0]) == 10
    code, answer, err = await run(*words)
    assert (code, answer and answer["written"]) == (0, True), err
    assert [(row["from"], row["to"], row["deleted"]) for row in answer["partitions"]] == [(11, 0, 10), (3, 0, 3)]
    assert (await lab.state(0), await lab.committed()) == ({}, {0: 0, 1: 0})
    code, answer, err = await run("--restore", file)
    assert (code, answer and answer["written"]) == (0, True), err
    assert ((await lab.state(0), await lab.state(1)), await lab.committed()) == (before, {0: 11, 1: 3})
    words = ("--to", "0@5", "--to", "1@1", "--state", "drop", "--backup")
    code, answer, err = await run(*words, file)
    assert (code, "is there, with another state than that of now" in err) == (1, True), err
    code, answer, err = await run(*words, file := f"{file}.2")
    assert (code, answer and answer["written"]) == (0, True), err
    async with Running(lab.telling(state=folder)) as running:
        await running.until_handled(11, 3)
    assert await lab.counts(0) == dict.fromkeys("fghija", 1)
    assert await lab.counts(1) == dict.fromkeys("yz", 1)
    code, _, err = await run("--restore", file)
    assert (code, "a member has run since the reset" in err) == (1, True), err
    shown = (await asyncio.to_thread(kes, source, "state", "ls"))[1]["partitions"]
    assert [row["begun"] for row in shown] == [f"reset: {lab.topic} from {one}" for one in ("11 to 5", "3 to 1")]
    names = [name for name, _ in await lab.totals()]
    assert sorted(names) == sorted([*NAMES, "a", *"xyz", *"fghija", *"yz"]), "sent a second time"
    await lab.check_settled()


@pytest.mark.nightly
@pytest.mark.timeout(400)
async def test_killed_at_any_step_it_is_reset_or_not_at_all(lab: Lab, tmp_path: Path) -> None:
    """The next run ends what the killed one has left open."""
    await lab.create()
    await lab.add(*NAMES)
    await lab.add(*"xyz", partition=1)
    async with Running(lab.telling()) as running:
        await running.until_handled(10, 3)
    before = str(tmp_path / "before.jsonl")

    async def run(step: str, *words: str) -> Any:
        return await killed(lab, lab.group, step, *words, command="reset")

    calls = [f"{when} {name}" for name in ("open", "hold", "send") for when in ("before", "after")]
    for number, step in enumerate([*calls, "before commit", *(f"within commit {ms}" for ms in (0, 2, 10, 100))]):
        file = f"{before}.{number}"
        for words in (("--to", "earliest", "--state", "drop", "--backup", file), ("--restore", file)):
            if not (step.startswith("within") and "--restore" in words):  # once it is undone, there is nothing to undo
                await run(step, *words)
            assert await run("", *words) is not None
            rows = [len(await lab.state(0)), len(await lab.state(1))]
            assert rows == ([10, 3] if "--restore" in words else [0, 0]), (step, words)
    await run("", "--to", "earliest", "--state", "drop", "--no-backup")
    assert await lab.committed() == {0: 0, 1: 0}
    async with Running(lab.telling()) as running:
        await running.until_handled(10, 3)
    assert (await lab.counts(0), await lab.counts(1)) == (dict.fromkeys(NAMES, 1), dict.fromkeys("xyz", 1))
    await lab.check_settled()
