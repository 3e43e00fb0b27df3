"""The code of the guide to timers runs, with its test in virtual time; and the record that it shows is one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from streams.records import IncomingRecord
from streams.runtime.changelog import decode_timer, timer_key

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "timers.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def test_the_example_and_its_test() -> None:
    names: dict[str, Any] = {"__name__": "timers_guide"}
    for block in blocks("python"):
        exec(compile(block, str(PAGE), "exec"), names)
    names["test_a_visit_ends_when_nothing_was_viewed_for_half_an_hour"]()


def test_the_record() -> None:
    (block,) = blocks("json")
    name, timer = decode_timer(IncomingRecord("c", 0, 0, timer_key("n"), block.encode(), None))
    assert timer is not None
    assert (name, json.loads(timer.value), timer.key) == ("n", {"order": "o7"}, b"o7")
