"""A muted source on a real broker: killed on its way, never beyond the running one, and silent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streams.errors import ConfigError
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from tests.broker.engine_kit import Lab, Running, start_failure
from tests.broker.muted_program import second
from tests.unit.waiting import stays

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]

PARTITIONS = 1
PROGRAM = Path(__file__).with_name("muted_program.py")
NAMES = [f"n{number % 7}" for number in range(60)]


async def test_it_follows_the_running_one_through_a_kill(
    lab: Lab, kes: Callable[..., tuple[int, Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    await lab.create()
    await lab.add(*NAMES)
    old, new = lab.telling(), second(lab)
    module = ModuleType("running")
    vars(module).update(source=old)
    monkeypatch.setitem(sys.modules, "running", module)
    changelog = new.config.changelog

    async def command(*words: str) -> tuple[int, Any, str]:
        return await asyncio.to_thread(kes, new, *words)

    async def position() -> int:
        found = [one for one in await lab.records(changelog, 0) if one.key == OFFSET_KEY]
        assert all(decode_offset(one).is_muted for one in found)
        return decode_offset(found[-1]).offset if found else 0

    assert "changelog does not say that the partition is muted" in str(await start_failure(second(lab)))
    code, _, err = await command("rebuild", "start", "--of", "running:source", "--yes")
    assert (code, "has not run yet" in " ".join(err.split())) == (1, True), err
    async with Running(old) as running:
        await running.until_handled(len(NAMES))
    for written in (True, False):
        code, answer, err = await command("rebuild", "start", "--of", "running:source", "--yes")
        assert (code, answer and answer["written"]) == (0, written), err
    assert isinstance(await start_failure(second(lab, shadow_of="")), ConfigError)
    program = [sys.executable, str(PROGRAM), lab.bootstrap, lab.topic.removesuffix("in"), str(PARTITIONS)]
    process = subprocess.Popen(program)
    try:
        while not await position():
            await asyncio.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    said = await lab.totals()
    async with Running(new) as running:
        await running.until_handled(len(NAMES))
        await lab.add(*NAMES[:10])  # the running one stands still
        standing = new.statistics
        await asyncio.to_thread(
            stays, lambda: standing().partitions[0].next_offset == len(NAMES), 1.0, "it is beyond the running one"
        )
        code, answer, err = await command("rebuild", "status", "--max-behind", "0")
        assert (code, answer and answer["behind"]) == (0, 0), err
        async with Running(lab.telling()) as again:
            await again.until_handled(len(NAMES) + 10)
            await running.until_handled(len(NAMES) + 10)
        assert new.statistics().muted_records[lab.output] > 0
    assert await lab.totals() == [*said, *(await lab.totals())[len(NAMES) :]]
    assert len(await lab.totals()) == len(NAMES) + 10
