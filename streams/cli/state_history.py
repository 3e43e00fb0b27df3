"""``kes state history``: the values that a key had, as far as the changelog still has them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from streams.cli.cluster import Json, Servers, SourceName, Timeout, named_source
from streams.cli.console import complain, emit, plain_table
from streams.cli.state_files import Partition
from streams.cli.state_sources import decoded, decoded_entry, opened
from streams.codecs import RESERVED_KEY_PREFIX
from streams.looks.records import one_line, shortened, shown_time
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.changelog import OFFSET_KEY, decode_offset
from streams.runtime.ownership.replicas import make_store
from streams.sak.harmless import harmless

_WIDEST = 100


def history(
    source: SourceName,
    key: Annotated[str, typer.Argument(help="Key, as shown by `scan`: o1, 17, or JSON.")],
    partition: Partition = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Show the values that a key had, oldest first, with the next offset of the input after each change.

    Compaction removes older values, so others may have been between those that are shown; and the offset may be that of
    a later transaction.

    Exit codes: 0 shown; 1 the changelog has no value of the key, or no broker answers; 2 wrong usage.
    """
    found = named_source(source)
    store = make_store(found.program().store_factory, TopicPartition(found.config.topic, 0))
    rows: list[dict[str, Any]] = []
    open_rows: dict[int, list[dict[str, Any]]] = {}

    def receive(number: int, records: list[IncomingRecord]) -> None:
        for record in records:
            if record.key == OFFSET_KEY:
                for row in open_rows.pop(number, []):
                    row["position"] = decode_offset(record).offset
            elif record.key is not None and not record.key.startswith(RESERVED_KEY_PREFIX):
                if one_line(decoded(store, "decode_key", record.key)[0]) != key:
                    continue
                value = None if record.value is None else decoded_entry(store, record.key, record.value)[0]
                rows.append(
                    {
                        "partition": number,
                        "offset": record.offset,
                        "position": None,
                        "time_ms": record.timestamp_ms,
                        "deleted": record.value is None,
                        "value": value,
                    }
                )
                open_rows.setdefault(number, []).append(rows[-1])

    try:
        with opened(found, bootstrap_servers, timeout, partition, "") as (_, read):
            read(receive)
    finally:
        store.revoked()
    rows.sort(key=lambda row: (row["partition"], row["offset"]))
    emit({"key": key, "versions": rows}, json, lambda: _table(rows))
    if not rows:
        complain(f"{found.config.changelog} has no value of the key {harmless(key)}")
        raise typer.Exit(1)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = plain_table("partition", "input below", "changed at", "value", right=("partition", "input below"))
    for row in rows:
        value = "(deleted)" if row["deleted"] else shortened(one_line(row["value"]), _WIDEST)
        position = "-" if row["position"] is None else f"{row['position']:,}"
        table.add_row(str(row["partition"]), position, shown_time(row["time_ms"]), Text(value))
    return table
