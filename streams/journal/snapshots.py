"""Snapshots of a state machine in a folder: verified, the newest kept, each with the position that it covers.

A file is a line of JSON (journal, id of its topic, position, size and SHA-256 of the state), then the state. It gets
its name when all of it is on the disk, so that a process that dies leaves no half snapshot under a name that counts.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec

from streams.errors import ConfigError, JournalError, OffsetError

_log = logging.getLogger(__name__)

_SUFFIX: Final = ".snapshot"
_FORMAT: Final = 1


class SnapshotHead(msgspec.Struct, frozen=True):
    """The first line of a snapshot."""

    format: int
    journal: str
    topic_id: str
    position: int
    size: int
    sha256: str


class LoadedSnapshot(NamedTuple):
    """A snapshot that is whole."""

    head: SnapshotHead
    state: bytes


class SnapshotFolder:
    """The snapshots of one replica. Blocks; one thread at a time; no two processes may share it.

    ``keep``: so many are kept, 1 or more. Raises ``ConfigError`` (no folder can be there, or no file in it).
    """

    def __init__(self, path: str | Path, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigError(f"a folder of snapshots keeps {keep}; it must be 1 or more")
        self.path, self.keep = Path(path), keep
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for left in self.path.glob(f".*{_SUFFIX}"):  # of a process that died
                left.unlink()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot hold snapshots: {error.strerror}") from None

    def save(self, journal: str, topic_id: str, position: int, write: Callable[[BinaryIO], None]) -> Path:
        """Write a snapshot, read it back, and delete the oldest ones before it. Raises what ``write`` raises, and
        ``JournalError`` (it cannot be written, or not be read again); older ones are left as they are then."""
        buffer = io.BytesIO()
        write(buffer)
        state = buffer.getvalue()
        digest = hashlib.sha256(state).hexdigest()
        head = SnapshotHead(_FORMAT, journal, topic_id, position, len(state), digest)
        final = self.path / f"{position:020d}{_SUFFIX}"
        passing = self.path / f".{final.name}"
        try:
            with passing.open("wb") as file:
                file.write(msgspec.json.encode(head) + b"\n")
                file.write(state)
                file.flush()
                os.fsync(file.fileno())
            read_snapshot(passing)
            passing.replace(final)
            self._sync()
            # Those of higher positions are not counted: they may be damaged, and this one is known to be whole.
            older = [path for path in self.files() if path.name < final.name]
            for old in older[self.keep - 1 :]:
                old.unlink()
        except OSError as error:
            passing.unlink(missing_ok=True)
            raise JournalError(f"{final} cannot be written: {error.strerror}") from error
        return final

    def files(self) -> list[Path]:
        """List the snapshots, the newest first."""
        return sorted(
            (path for path in self.path.glob(f"*{_SUFFIX}") if not path.name.startswith(".")),
            key=lambda path: path.name,
            reverse=True,
        )

    def whole(self) -> Iterator[LoadedSnapshot]:
        """Iterate over those that are whole, the newest first. Damaged ones are passed over, with a warning."""
        for path in self.files():
            try:
                yield read_snapshot(path)
            except JournalError as error:
                _log.warning("%s; the next older one is taken", error)

    def newest(self, journal: str, topic_id: str, start: int, end: int) -> LoadedSnapshot | None:
        """Return the newest that is whole; ``None``: there is none behind which the log (``start`` to ``end``) goes on.

        Raises ``JournalError`` (it is of another journal), ``OffsetError`` (it is newer than the log).
        """
        for found in self.whole():
            head = found.head
            if (head.journal, head.topic_id) != (journal, topic_id):
                raise JournalError(
                    f"{self.path} has a snapshot of the journal {head.journal} with the topic id {head.topic_id}, and "
                    f"this is {journal} with {topic_id}: the folder belongs to another one, or the topic was recreated"
                )
            if head.position > end:
                raise OffsetError(
                    f"{self.path} has a snapshot of position {head.position}, and {journal}[0] ends at {end}: the log "
                    "has lost entries"
                )
            return found if head.position >= start else None
        return None

    def _sync(self) -> None:
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_snapshot(path: Path) -> LoadedSnapshot:
    """Read and verify a snapshot. Raises ``JournalError``: it is damaged, or cannot be read."""
    try:
        line, _, state = path.read_bytes().partition(b"\n")
        head = msgspec.json.decode(line, type=SnapshotHead)
    except OSError as error:
        raise JournalError(f"the snapshot {path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise JournalError(f"the snapshot {path} is damaged: {error}") from None
    if head.format != _FORMAT:
        raise JournalError(f"the snapshot {path} has the format {head.format}, and this program knows {_FORMAT}")
    if len(state) != head.size or hashlib.sha256(state).hexdigest() != head.sha256:
        raise JournalError(f"the snapshot {path} is damaged: {len(state)} of {head.size} bytes, or another content")
    return LoadedSnapshot(head, state)
