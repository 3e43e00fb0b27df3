"""Whether a folder of state can be continued from a log: by its mark, its age, and what the log has behind it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streams.core.checkpoints import MARGIN_MS, FolderMark, distrust_by, reason_to_refuse
from tests.unit.kept_kit import DAY_MS, IDENTITY


def mark_of(**changes: Any) -> FolderMark:
    fields: dict[str, Any] = {
        "identity": IDENTITY, "offset": 7, "record": b"{}", "as_of_ms": 10 * DAY_MS, "file": "data-1", "size": 12,
        "crc": 0, "live": 0,
    }  # fmt: skip
    return FolderMark(**{**fields, **changes})


@pytest.mark.parametrize("name", ["cluster", "topic", "topic_id", "partition", "codec", "format"])
def test_a_folder_of_something_else_is_named(name: str) -> None:
    other = msgspec.structs.replace(IDENTITY, **{name: 9 if name in ("partition", "format") else "other"})
    reason = distrust_by(IDENTITY, now_ms=10 * DAY_MS, tombstones_ms=DAY_MS)(mark_of(identity=other))
    assert name.replace("_", " ") in reason
    assert not distrust_by(IDENTITY, now_ms=10 * DAY_MS, tombstones_ms=DAY_MS)(mark_of())


@pytest.mark.parametrize(
    ("age_ms", "good"),
    [
        (DAY_MS - MARGIN_MS, True),
        (DAY_MS - MARGIN_MS + 1, False),
        (-MARGIN_MS, True),
        (-MARGIN_MS - 1, False),
        (-DAY_MS, False),
    ],
)
def test_the_age_of_a_mark_is_compared_with_the_life_of_tombstones(age_ms: int, good: bool) -> None:
    reason = distrust_by(IDENTITY, now_ms=10 * DAY_MS + age_ms, tombstones_ms=DAY_MS)(mark_of())
    assert bool(reason) != good


def test_the_log_has_to_go_on_where_the_folder_ends() -> None:

    def reason(position: int, end: int, first: tuple[int, bytes, bool] | None) -> str:
        return reason_to_refuse(7, b"r", position=position, end=end, first=first)

    assert not reason(8, 9, (7, b"r", True)), "the record itself"
    assert not reason(12, 14, (9, b"x", False)), "compacted away for a younger one"
    assert not reason(7, -1, None), "nothing is known yet"
    assert not reason(7, 9, None), "nothing is read yet"
    assert "rewritten" in reason(8, 9, (7, b"other", True))
    assert "rewritten" in reason(8, 9, (7, b"r", False))
    assert "nothing between" in reason(9, 9, None)
    assert "ends at 7" in reason(7, 7, None)
