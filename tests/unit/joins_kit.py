"""The witness of a joined table: what a program has said of its events is folded again, in the order of its counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streams.records import IncomingRecord


def folded(
    where: object, lines: Sequence[Sequence[Any]], table: str, sent: Mapping[str, Sequence[IncomingRecord]]
) -> dict[str, int]:
    """Return the rows of a partition after ``lines``: of a row ``[count, topic, offset, key, old, new]``, of an event
    ``[count, topic, offset, key, row]``. ``sent``: the committed records of each topic. Fails for a count or an offset
    with a gap or twice, and for a row that was another one at that place."""
    assert [line[0] for line in lines] == list(range(1, len(lines) + 1)), f"{where}: counts, in their order"
    rows: dict[str, int] = {}
    offsets: dict[str, list[int]] = {topic: [] for topic in sent}
    records = {record.offset: record for record in sent[table]}
    for count, topic, offset, key, *facts in lines:
        offsets[topic].append(offset)
        assert facts[0] == rows.get(key), f"{where}, {count}: the row of {key} was {rows.get(key)}, said was {facts[0]}"
        if topic == table:
            record, new = records[offset], facts[1]
            assert (record.key, record.value is None) == (key.encode(), new is None), f"{where}: the row at {offset}"
            if new is None:
                rows.pop(key, None)
            else:
                rows[key] = new
    for topic, found in offsets.items():
        assert found == [record.offset for record in sent[topic]], f"{where}: the records of {topic}, once, in order"
    return rows
