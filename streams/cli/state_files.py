"""``kes state verify``, ``snapshot``, ``restore``, ``drop``: folders and their snapshots, by hand.

Nothing here writes to a folder that a process has locked.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from streams.cli.cluster import Json, Servers, SourceName, Timeout, named_source, refuse_to_ask
from streams.cli.console import complain, emit, plain_table
from streams.cli.folders import codec_of, partitions_on_disk, reason_not_to_use
from streams.cli.state_sources import (
    folder_of,
    newest,
    snapshots_at,
    state_of,
    topic_id_of,
    unreadable,
)
from streams.core.checkpoints import FolderMark, LogIdentity
from streams.core.manifests import BLOCK_BYTES, SnapshotRefused
from streams.errors import DiskDamaged, StoreError, StreamsError
from streams.looks.records import one_line, shortened
from streams.looks.scans import late_lines
from streams.records import TopicPartition
from streams.runtime.keeping.folders.entries import Damaged
from streams.runtime.keeping.folders.folder import StateFolder, check_private, partition_of_name, read_mark
from streams.runtime.keeping.folders.parents import parent_of, prepare_root
from streams.runtime.keeping.folders.shelf import choose
from streams.runtime.keeping.on_disk import finder_for, layout_of, read_database
from streams.runtime.keeping.snapshots.bundles import SnapshotStore
from streams.runtime.keeping.snapshots.snapshotting import WritingPace
from streams.runtime.ownership.replicas import make_store
from streams.sak.harmless import harmless
from streams.source.event_source import EventSource

_TRIES: Final = 10
_SHOWN: Final = 20
"""Values that cannot be read are named, so many of each partition."""
_NUMBERS: Final = ("offset", "bytes", "written", "put", "deleted")
_WRONG: Final = (Damaged, DiskDamaged, SnapshotRefused, StoreError, OSError)

Partition = Annotated[
    list[int] | None, typer.Option("--partition", "-p", min=0, help="Only this partition. Repeatable.")
]
Folder = Annotated[
    str, typer.Option("--folder", metavar="DIR", help="Folder of the state. Default: StateConfig.folder.")
]
_Address = Annotated[
    str,
    typer.Option("--snapshots", metavar="ADDRESS", help="Address of the snapshots. Default: StateConfig.snapshots."),
]


def verify(
    source: SourceName,
    folder: Folder = "",
    snapshots: _Address = "",
    what: Annotated[
        str, typer.Option("--what", help="What to verify: folder or snapshots; with --decode changelog, too.")
    ] = "folder",
    decode: Annotated[
        bool, typer.Option("--decode", help="Read each value by the source's codecs, too, and name those that fail.")
    ] = False,
    partition: Partition = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Verify every byte of folders, or of all snapshots, and report what is damaged.

    A database that a process has locked is skipped. --decode reads the state once more, of snapshots the newest ones,
    as the source would: it finds values that this release of the classes cannot read.

    Exit codes: 0 everything is intact; 1 something is damaged, or there is nothing; 2 wrong usage.
    """
    found = named_source(source)
    if what not in ("folder", "snapshots") and not (decode and what == "changelog"):
        raise typer.BadParameter("use folder or snapshots; with --decode changelog, too", param_hint="--what")
    rows, where = list[dict[str, Any]](), ""
    if what == "folder":
        where = folder or folder_of(found)
        rows = _verified_folders(found, where, partition)
    elif what == "snapshots":
        where = snapshots or found.config.state.snapshots
        rows = _verified_snapshots(found, snapshots, bootstrap_servers, timeout, partition)
    if decode and not any(row["problem"] and not row["skipped"] for row in rows):
        rows += _decoded(found, f"{what}:{where}" if where else what, bootstrap_servers, timeout, partition)
    emit(rows, json, lambda: rows_table(rows, "partition", "name", "offset", "bytes", "problem"))
    if not rows:
        which = "" if partition is None else f" of the partitions {partition}"
        complain(f"there is nothing to verify: {where} has no {what}{which} of the group {found.config.group_id}")
    if not rows or any(row["problem"] and not row["skipped"] for row in rows):
        raise typer.Exit(1)


def _row(partition: int, name: str, offset: int, size: int, problem: str, *, skipped: bool = False) -> dict[str, Any]:
    return {
        "partition": partition,
        "name": name,
        "offset": offset,
        "bytes": size,
        "problem": problem,
        "skipped": skipped,
    }


def _decoded(
    source: EventSource[Any], side: str, servers: str, timeout: float, wanted: list[int] | None
) -> list[dict[str, Any]]:
    """Decode the state of a side; return a row of each value that cannot be read, the first ones of each partition, and
    one of the partition."""
    store = make_store(source.program().store_factory, TopicPartition(source.config.topic, 0))
    rows: list[dict[str, Any]] = []
    for number, state in sorted(state_of(source, side, servers, timeout, wanted).items()):
        wrong = 0
        for key, value in sorted(state.entries.items()):
            name, problem = unreadable(store, key, value)
            wrong += bool(problem)
            if problem and wrong <= _SHOWN:
                rows.append(_row(number, f"key {shortened(one_line(name), 80)}", state.offset, len(value), problem))
        size = sum(map(len, state.entries.values()))
        text = f"{wrong:,} of {len(state.entries):,} entries cannot be read" if wrong else ""
        rows.append(_row(number, f"{len(state.entries):,} entries", state.offset, size, text))
    store.revoked()
    return rows


def _verified_folders(source: EventSource[Any], folder: str, wanted: list[int] | None) -> list[dict[str, Any]]:
    parent = parent_of(folder, source.config.group_id, source.config.topic)
    store = make_store(source.program().store_factory, TopicPartition(source.config.topic, 0))
    store.revoked()
    rows: list[dict[str, Any]] = []
    for number, path in _folders(parent, wanted):
        try:
            check_private(path)
            mark = read_mark(path)
            if mark is None:
                continue
        except (Damaged, OSError) as error:
            rows.append(_row(number, path.name, -1, 0, str(error)))
            continue
        problem, skipped = "", False
        try:
            if (path / mark.file).is_dir():
                skipped = not read_database(path, store, source.config)
                problem = "a process has it locked" if skipped else ""
            else:
                _read_all(path, late_lines("bytes"))
        except _WRONG as error:
            problem = str(error)
        rows.append(_row(number, path.name, mark.offset, mark.size, problem, skipped=skipped))
    return rows


def _read_all(path: Path, report: Callable[[str, int, int], None]) -> None:
    """Read a data file to its end. Raises ``Damaged`` and ``OSError``."""
    for tries_left in range(_TRIES - 1, -1, -1):
        folder = StateFolder(path, -1)
        folder.mark = mark = read_mark(path)
        assert mark is not None
        try:
            for count, _ in enumerate(folder.load(), 1):
                report(f"reading {path}", min(count << 20, mark.size), mark.size)
            return
        except Damaged:
            if not tries_left or read_mark(path) == mark:
                raise  # else it was rewritten meanwhile


def _verified_snapshots(
    source: EventSource[Any], address: str, servers: str, timeout: float, wanted: list[int] | None
) -> list[dict[str, Any]]:
    store = snapshots_at(source, address, _wall_ms)
    topic_id, partitions = topic_id_of(source, servers, timeout)
    rows: list[dict[str, Any]] = []
    for number in sorted(set(wanted)) if wanted else range(partitions):
        prefix, report = store.prefix(topic_id, number), late_lines("bytes")
        try:
            names = store.names(prefix)
        except OSError as error:
            raise StoreError(f"{prefix}: {error}") from error
        for _, offset, name, _ in names:
            size, problem = 0, ""
            try:
                manifest = store.manifest(prefix, name)
                size = manifest.mark.size
                for _ in store.pieces(manifest, partial(report, f"reading {name}")):
                    pass
            except _WRONG as error:
                problem = str(error)
            rows.append(_row(number, name, offset, size, problem))
    return rows


def snapshot(
    source: SourceName,
    folder: Folder = "",
    snapshots: _Address = "",
    partition: Partition = None,
    json: Json = False,
) -> None:
    """Upload a snapshot of each folder as of its last checkpoint. Needs no broker; the folder may be in use.

    Writes at most StateConfig.snapshot_bytes_per_second. Databases are left out: the source makes their snapshots.

    Exit codes: 0 made; 1 a folder or the snapshot store cannot be used; 2 wrong usage.
    """
    found = named_source(source)
    store = snapshots_at(found, snapshots, _wall_ms, WritingPace(found.config.state.snapshot_bytes_per_second))
    where = folder or folder_of(found)
    parent, codec = parent_of(where, found.config.group_id, found.config.topic), codec_of(found)
    rows: list[dict[str, Any]] = []
    for number in partitions_on_disk(found, where, partition):
        path = chosen(parent, number, partial(reason_not_to_use, found.config, number, codec))
        try:
            saved, offset = _save(store, path)
        except _WRONG as error:
            raise StoreError(f"{path}: {error}") from error
        rows.append(
            {"partition": number, "name": saved.name, "offset": offset, "bytes": saved.size, "written": saved.uploaded}
        )
    emit(rows, json, lambda: rows_table(rows, "partition", "name", "offset", "bytes", "written"))


def _save(store: SnapshotStore, path: Path) -> tuple[Any, int]:
    for tries_left in range(_TRIES - 1, -1, -1):
        check_private(path)
        folder = StateFolder(path, -1)
        folder.mark = mark = read_mark(path)
        if mark is None:
            raise Damaged("it has no mark: there is nothing in it yet")
        if (path / mark.file).is_dir():
            raise Damaged(f"its state is in a database ({mark.file}), of which the source makes snapshots itself")
        data, report = folder.data(BLOCK_BYTES), late_lines("bytes")
        assert data is not None
        try:
            return store.save(mark, reported(data[1], report, str(path), mark.size)), mark.offset
        except Damaged:
            if not tries_left or read_mark(path) == mark:
                raise  # else its file was rewritten meanwhile
    raise AssertionError("unreachable")


def reported(pieces: Iterator[bytes], report: Callable[[str, int, int], None], name: str, size: int) -> Iterator[bytes]:
    """Report the progress of writing these pieces. ``size``: of all; 0: not known."""
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece)
        report(f"writing {name}", done, size)


def restore(
    source: SourceName,
    folder: Folder = "",
    snapshots: _Address = "",
    partition: Partition = None,
    bootstrap_servers: Servers = "",
    timeout: Timeout = 30.0,
    json: Json = False,
) -> None:
    """Fill empty folders from the newest snapshots, before a source starts. A source does the same at its start.

    The source still decides at its start whether a folder is recent enough. Exit codes: 0 all are filled; 1 one is not,
    or no broker answers; 2 wrong usage.
    """
    found = named_source(source)
    config = found.config
    store = snapshots_at(found, snapshots, _wall_ms)
    topic_id, partitions = topic_id_of(found, bootstrap_servers, timeout)
    parent = prepare_root(folder or folder_of(found), config.group_id, config.topic)
    made = make_store(found.program().store_factory, TopicPartition(config.topic, 0))
    find, codec = finder_for(config, made), layout_of(made)
    made.revoked()
    rows: list[dict[str, Any]] = []
    for number in sorted(set(partition)) if partition else range(partitions):
        report = late_lines("bytes")
        name = problem = ""
        try:
            if any(_offset(path) >= 0 for _, path in _folders(parent, [number])):
                raise StoreError("there is a folder already: kes state drop removes it")
            manifest = newest(store, store.prefix(topic_id, number))
            identity = LogIdentity(manifest.mark.identity.cluster, config.changelog, topic_id, number, codec)
            name = store.fill(
                partial(find, parent, number),
                identity,
                set(),
                partial(report, f"filling {number}"),
                tombstones_ms=1 << 62,
            )
            problem = "" if name else "no snapshot can be used; the log has the reasons"
        except (*_WRONG, StreamsError) as error:
            problem = str(error)
        rows.append({"partition": number, "name": name, "problem": problem})
    emit(rows, json, lambda: rows_table(rows, "partition", "name", "problem"))
    if any(row["problem"] for row in rows):
        raise typer.Exit(1)


def drop(
    source: SourceName,
    folder: Folder = "",
    partition: Partition = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")] = False,
    json: Json = False,
) -> None:
    """Remove folders, including those that were set aside. The changelog holds the same state.

    Exit codes: 0 removed; 1 a folder is in use, there is none, or not confirmed; 2 wrong usage.
    """
    found = named_source(source)
    refuse_to_ask(json=json, yes=yes)
    parent = parent_of(folder or folder_of(found), found.config.group_id, found.config.topic)
    paths = [path for _, path in _folders(parent, partition, aside=True)]
    if not paths:
        which = "" if partition is None else f", and its partitions {partition},"
        raise StoreError(f"{parent}: no state of the group {found.config.group_id}{which} is kept there")
    if not yes:
        typer.confirm(f"remove {', '.join(path.name for path in paths)} in {parent}?", abort=True)
    rows = [{"name": path.name, "problem": _remove(path)} for path in paths]
    emit(rows, json, lambda: rows_table(rows, "name", "problem"))
    if any(row["problem"] for row in rows):
        raise typer.Exit(1)


def _remove(path: Path) -> str:
    """Remove a folder; return why it cannot be."""
    try:
        if path.is_symlink():
            return "it is a link"
        lock = None
        if partition_of_name(path.name) is not None:
            lock = StateFolder.open(path)
            if lock is None:
                return "a process has it locked"
        try:
            shutil.rmtree(path)
        finally:
            if lock is not None:
                lock.close()
    except OSError as error:
        return str(error)
    return ""


def _folders(parent: Path, wanted: list[int] | None, *, aside: bool = False) -> list[tuple[int, Path]]:
    """Return the folders of partitions, in order."""
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise StoreError(f"{parent}: {error}") from error
    found: list[tuple[int, Path]] = []
    for name in names:
        named = partition_of_name(name.removesuffix(".aside") if aside else name)
        if named is not None and (not wanted or named[0] in wanted):
            found.append((named[0], parent / name))
    return sorted(found)


def chosen(parent: Path, number: int, distrust: Callable[[FolderMark], str]) -> Path:
    """Return the folder of a partition that its start would choose."""
    found: list[tuple[FolderMark, Path]] = []
    for _, path in _folders(parent, [number]):
        with contextlib.suppress(Damaged, OSError):
            mark = read_mark(path)
            found += [] if mark is None else [(mark, path)]
    return choose(found, distrust)[1] if found else parent / str(number)


def _offset(path: Path) -> int:
    try:
        mark = read_mark(path)
    except (Damaged, OSError):
        return -1
    return -1 if mark is None else mark.offset


def rows_table(rows: list[dict[str, Any]], *names: str) -> Table:
    """Return rows as a table of these columns."""
    table = plain_table(*names, right=_NUMBERS, folded=("problem", "result"))
    for row in rows:
        texts = [
            f"{row[name]:,}" if isinstance(row[name], int) and name != "partition" else harmless(str(row[name]))
            for name in names
        ]
        table.add_row(*texts)
    return table


def _wall_ms() -> int:
    return int(time.time() * 1000)
