"""``--as-of`` and ``kes state history`` beside a real broker: exact, or refused with the nearest exact place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.broker.engine_kit import Lab, Running

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(180)]

Kes = Callable[..., tuple[int, Any, str]]
NAMES = "abcdefgh"


def shown(answer: Any) -> dict[str, int]:
    return {entry["key"]: entry["value"] for entry in answer["entries"]}


async def test_the_state_as_it_was_is_shown_exported_and_compared(lab: Lab, kes: Kes, tmp_path: Path) -> None:
    await lab.create()
    source = lab.telling()

    async def state(*words: str) -> tuple[int, Any, str]:
        code, answer, err = await asyncio.to_thread(kes, source, "state", *words)
        return code, answer, " ".join(err.split())

    async with Running(source) as running:
        await lab.add("a", "b", "a")
        await running.until_handled(3)
    async with Running(lab.telling()) as running:
        await lab.add("a", "c")
        await running.until_handled(5)
    code, answer, err = await state("scan", "--as-of", "0@3")
    assert (code, answer and shown(answer)) == (0, {"a": 2, "b": 1}), err
    code, answer, err = await state("get", "a", "--as-of", "0@5")
    assert (code, answer and shown(answer)) == (0, {"a": 3}), err
    code, _, err = await state("scan", "--as-of", "0@9")
    assert (code, "no transaction is known to have ended at 0@9; the nearest exact places are 0@5" in err) == (1, True)
    code, answer, err = await state("export", file := str(tmp_path / "then"), "--from", "changelog:0@3")
    assert (code, answer and answer["partitions"][0]["entries"]) == (0, 2), err
    assert (await state("diff", "changelog:0@3", "changelog"))[1]["differences"] == 2
    assert (await state("diff", file, "changelog:0@3"))[1]["differences"] == 0
    code, answer, err = await state("history", "a")
    versions = [(one["value"], one["position"]) for one in answer["versions"]]
    # One transaction has one change of a key.
    assert [value for value, _ in versions] in ([1, 2, 3], [2, 3])
    assert versions[-2][1] == 3
    assert versions[-1][1] in (4, 5)
    before = "2020-01-01T00:00Z"
    assert (await state("scan", "--as-of", before))[1]["entries"] == []
    assert (await state("scan", "--as-of", before, "--folder", "x"))[0] == 2


@pytest.mark.nightly
@pytest.mark.slow
async def test_a_compacted_changelog_is_exact_or_says_so(lab: Lab, kes: Kes) -> None:
    """The broker's own cleaner: each place is as it was, or refused."""
    await lab.create()
    often: Any = {"segment_ms": "100", "min_cleanable_dirty_ratio": "0.01", "delete_retention_ms": "0"}
    await lab.create(lab.changelog, cleanup_policy="compact", **often)
    source = lab.telling()
    then: dict[str, dict[str, int]] = {}
    async with Running(source) as running:
        for number in range(12):
            await lab.add(*NAMES[: 2 + number % 7])
            end = (await lab.watermarks(lab.topic))[0].end
            await running.until_handled(end)
            then[f"0@{end}"] = await lab.counts()
        whole = len(await lab.records(lab.changelog))
        async with asyncio.timeout(120):
            while len(await lab.records(lab.changelog)) == whole:
                await asyncio.sleep(1)
    refused = 0
    for place, wanted in then.items():
        code, answer, err = await asyncio.to_thread(kes, source, "state", "scan", "--as-of", place)
        if code:
            refused += 1
            assert "nearest exact place" in err
        else:
            assert shown(answer) == wanted, place
    assert 0 < refused < len(then), "the oldest are gone, and the newest is there"
