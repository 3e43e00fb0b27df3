"""``kes state convert``: folders of another engine become those of the source's, without reading the changelog."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer

from streams.cli.cluster import Json, SourceName, named_source
from streams.cli.console import emit
from streams.cli.folders import partitions_on_disk, reason_not_to_use
from streams.cli.state_files import Folder, Partition, chosen, reported, rows_table
from streams.cli.state_sources import folder_of
from streams.core.checkpoints import FolderMark
from streams.core.manifests import BLOCK_BYTES
from streams.disk import RocksDB, SQLite
from streams.errors import DiskDamaged, StoreError, StreamsError
from streams.looks.scans import late_lines
from streams.protocols import DiskEngine, DiskStore
from streams.records import TopicPartition
from streams.runtime.keeping.folders.entries import Damaged
from streams.runtime.keeping.folders.folder import StateFolder, read_mark
from streams.runtime.keeping.folders.place import place_of
from streams.runtime.keeping.on_disk import DatabaseFolder, layout_of
from streams.runtime.ownership.replicas import make_store
from streams.settings.config import EventSourceConfig
from streams.stores.layered_bytes import without_engine

_FILES: Final = "files"
_WRONG: Final = (Damaged, DiskDamaged, StreamsError, OSError)


class _Kind(NamedTuple):
    """The folders that the source wants. ``engine``: ``None`` for files."""

    config: EventSourceConfig
    engine: DiskEngine | None
    layout: str

    @property
    def name(self) -> str:
        return _FILES if self.engine is None else self.engine.name


def convert(
    source: SourceName,
    folder: Folder = "",
    partition: Partition = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing: say what would be done.")] = False,
    json: Json = False,
) -> None:
    """Convert folders of another engine, or of none, to the engine of the source's store. The source must be stopped.

    Keys and values stay as they are, byte by byte: a store of other codecs is refused. Killed within it, a folder is as
    it was, or empty for the new engine; the changelog has all of it.

    Exit codes: 0 all are as the source wants them; 1 one is not, or there is none; 2 wrong usage.
    """
    found = named_source(source)
    config, where = found.config, folder or folder_of(found)
    made = make_store(found.program().store_factory, TopicPartition(config.topic, 0))
    kind = _Kind(config, made.disk if isinstance(made, DiskStore) else None, layout_of(made))
    made.revoked()
    parent = place_of(where, config.group_id, config.topic)
    rows = [
        _row(chosen(parent, number, partial(_reason_against, number, kind)), number, kind, dry_run)
        for number in partitions_on_disk(found, where, partition)
    ]
    emit(rows, json, lambda: rows_table(rows, "partition", "from", "to", "offset", "bytes", "result"))
    if any(row["problem"] for row in rows):
        raise typer.Exit(1)


def _row(path: Path, number: int, kind: _Kind, dry_run: bool) -> dict[str, Any]:
    """Convert one folder, if it is of another kind."""
    row = {"partition": number, "from": "", "to": kind.name, "offset": -1, "bytes": 0, "problem": ""}
    result = ""
    try:
        lock = StateFolder.open(path)
        if lock is None:
            raise StoreError("a process has it locked: stop the source")
        try:
            mark = read_mark(path)
            if mark is None:
                raise StoreError("it has no mark: there is nothing in it yet")
            engine = mark.file.removeprefix("data-") if (path / mark.file).is_dir() else ""
            row |= {"from": engine or _FILES, "offset": mark.offset}
            if reason := _reason_against(number, kind, mark):
                raise StoreError(reason)
            if mark.identity.codec == kind.layout:
                result = "is as it should be"
            elif dry_run:
                result = "would be converted"
            else:
                row["offset"], row["bytes"] = _convert(path, mark, kind, engine)
                result = "converted"
        finally:
            lock.close()
    except _WRONG as error:
        row["problem"] = f"{path}: {error}"
    return row | {"result": row["problem"] or result}


def _reason_against(number: int, kind: _Kind, mark: FolderMark) -> str:
    """Return why a folder is not to be converted: it is of another log, or of other codecs."""
    codec = mark.identity.codec
    reason = reason_not_to_use(kind.config, number, codec, mark)
    before, now = without_engine(codec), without_engine(kind.layout)
    if reason or before == now:
        return reason
    return (
        f"its state is that of {before}, and the source has {now}: the changelog has the same bytes, so a folder "
        "alone cannot be converted"
    )


def _convert(path: Path, mark: FolderMark, kind: _Kind, engine: str) -> tuple[int, int]:
    """Write a folder's state anew, beside the old one, which counts until the mark is replaced; return its offset and
    bytes. ``engine``: the name of that it has; empty for files."""
    before, after = _folder(path, _engine_of(engine, kind), kind), _folder(path, kind.engine, kind)
    before.mark = mark
    try:
        if isinstance(before, DatabaseFolder):
            found = before.read_own_mark()
            if found is None:
                raise StoreError("its database has no mark: there is nothing in it yet")
            mark = found
        if isinstance(after, DatabaseFolder):
            shutil.rmtree(after.place, ignore_errors=True)  # of a conversion that was killed
        data, size = before.data(BLOCK_BYTES), 0
        assert data is not None

        def counted() -> Iterator[bytes]:
            nonlocal size
            for piece in reported(data[1], late_lines("bytes"), str(path), mark.size):
                size += len(piece)
                yield piece

        try:
            after.fill(counted())
            before.close()  # before its files are removed
            identity = msgspec.structs.replace(mark.identity, codec=kind.layout)
            after.commit(identity, mark.offset, mark.record, mark.as_of_ms)
            after.remove_strays()
        except BaseException:
            if isinstance(after, DatabaseFolder) and after.mark is None:
                after.close()
                shutil.rmtree(after.place, ignore_errors=True)
            raise
        return mark.offset, size
    finally:
        before.close()
        after.close()


def _folder(path: Path, engine: DiskEngine | None, kind: _Kind) -> StateFolder:
    """Make a folder object of that kind; the lock is held beside it."""
    if engine is None:
        return StateFolder(path, -1)
    folder = DatabaseFolder(path, -1)
    folder.equip(engine, kind.config)
    return folder


def _engine_of(name: str, kind: _Kind) -> DiskEngine | None:
    """Return the engine of this name. Raises ``StoreError`` for one that is not known here."""
    if not name:
        return None
    if kind.engine is not None and kind.engine.name == name:
        return kind.engine
    for known in (SQLite, RocksDB):
        if known.name == name:
            return known()
    raise StoreError(f"it is of the engine {name}, which is neither the source's nor of this package")
