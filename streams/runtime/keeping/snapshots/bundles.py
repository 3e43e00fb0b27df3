"""Snapshots of one source in a folder or a store of objects: how they are made, read and removed.

Layout: ``group-G/topic-T/<topic id of the changelog>/<partition>/manifest-...`` and ``.../blocks/<sha-256>-<token>``.
Blocks are written first, and read back; the manifest comes after them, so one that is there is whole.

Several makers of one partition may be at work at once, and any of them may stand still anywhere, for hours, and go on:
a store of objects has no locks. A *hold* has the token of a snapshot that is being made, and keeps its blocks. Once it
is gone the snapshot counts. The order of the steps is the point of ``save`` and ``_collect``
(``tests/model/snapshot_rules.py`` has the rules, and what breaks without each).

A log may lose its end (an unclean election). A snapshot that goes farther than the log does then holds up no new one:
it counts neither as one that is there nor as one that was made lately. It stays until a new one is written, read back
and counts; then it goes, whatever the number that is kept. Its offset is the highest, so it would displace good ones,
and once the log is written past it, and compacted there, nothing tells it from them.

Everything here blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

from streams.core.checkpoints import FolderMark, LogIdentity, distrust_by
from streams.core.manifests import (
    HOLD_SECONDS,
    MOST_MANIFEST,
    Block,
    Manifest,
    ManifestName,
    SnapshotRefused,
    decode_manifest,
    encode_manifest,
    garbage,
    hold_of,
    name_of,
    parsed_names,
    ranked,
    superfluous,
    token_of_hold,
)
from streams.disk.blobs import Blobs, open_blobs
from streams.errors import ConfigError, Stopped
from streams.runtime.keeping.folders.entries import HEAD, Damaged
from streams.runtime.keeping.folders.folder import StateFolder
from streams.runtime.keeping.folders.parents import room_at
from streams.runtime.keeping.folders.shelf import set_aside
from streams.sak.private_files import read_private
from streams.settings.groups import StateConfig

_log = logging.getLogger(__name__)

_NOT_CUT: Final = 1 << 63
"""No log reaches this offset: nothing is cut."""
_TOO_SHORT: Final = 16
"""A secret of fewer bytes is refused."""


class SavedSnapshot(NamedTuple):
    """A snapshot that was made: its name, all bytes, and those of them that were not there before."""

    name: str
    size: int
    uploaded: int


class SnapshotStore:
    """The snapshots of one source. ``is_over`` ends whatever is under way by ``Stopped``. One call at a time for each
    partition."""

    def __init__(
        self,
        blobs: Blobs,
        group_id: str,
        topic: str,
        *,
        wall_ms: Callable[[], int],
        secret: bytes = b"",
        keep: int = 3,
        pace: Callable[[int], None] = lambda size: None,
        is_over: Callable[[], bool] = lambda: False,
        end: Callable[[int], int] = lambda partition: -1,
    ) -> None:
        """``pace`` is called with the bytes of each block that was written, and may wait. ``end`` requests the end of
        a partition's log, -1 if it cannot be had."""
        self._blobs, self._wall_ms = blobs, wall_ms
        self._secret, self._keep, self._pace, self._is_over, self._end = secret, keep, pace, is_over, end
        self._root = f"group-{_encoded(group_id)}/topic-{_encoded(topic)}"
        self._known: dict[str, Manifest] = {}  # they never change

    def prefix(self, topic_id: str, partition: int) -> str:
        """Return the folder of a partition."""
        return f"{self._root}/{_encoded(topic_id)}/{partition}"

    # -- reading -------------------------------------------------------------------------------------------------------

    def names(self, prefix: str) -> list[ManifestName]:
        """Return the names of a partition's manifests, the one that was made last first. Raises ``OSError``."""
        return parsed_names(blob.name for blob in self._blobs.list(prefix))

    def manifest(self, prefix: str, name: str) -> Manifest:
        """Return a manifest. Raises ``SnapshotRefused`` and ``OSError``."""
        path = f"{prefix}/{name}"
        if path not in self._known:
            data = self._blobs.get(path, MOST_MANIFEST)
            if len(data) > MOST_MANIFEST:
                raise SnapshotRefused(f"it is larger than {MOST_MANIFEST} bytes")
            self._known[path] = decode_manifest(data, self._secret)
        return self._known[path]

    def manifests(
        self,
        prefix: str,
        refuse: Callable[[str, SnapshotRefused], object] = lambda name, error: None,
        *,
        without: Collection[str] = (),
    ) -> list[tuple[str, Manifest]]:
        """Return names and manifests of a partition, the newest state first. ``refuse`` is called with each that
        cannot be read. Raises ``OSError``."""
        return self._read(prefix, (one.name for one in self.names(prefix) if one.name not in without), refuse)

    def _read(
        self, prefix: str, names: Iterable[str], refuse: Callable[[str, SnapshotRefused], object]
    ) -> list[tuple[str, Manifest]]:
        found: list[tuple[str, Manifest]] = []
        for name in names:
            try:
                found.append((name, self.manifest(prefix, name)))
            except FileNotFoundError:
                continue  # a maker has just removed it
            except SnapshotRefused as error:
                refuse(name, error)
        return ranked(found)

    def has(self, mark: FolderMark) -> bool:
        """Check for a snapshot of the same log and codec that goes as far as this mark, which the log goes on from.
        Raises ``OSError``."""
        prefix = self.prefix(mark.identity.topic_id, mark.identity.partition)
        marks = [manifest.mark for _, manifest in self.manifests(prefix)]
        cut = self.cut_at(mark, (one.offset for one in marks))
        marks = [one for one in marks if one.identity == mark.identity and mark.offset <= one.offset < cut]
        return any(one.offset > mark.offset or one.record == mark.record for one in marks)

    def cut_at(self, mark: FolderMark, offsets: Iterable[int]) -> int:
        """Return the offset from which on snapshots are of records that the log has lost, ``_NOT_CUT`` if there are
        none. ``mark``: of a folder that the log goes on from; ``offsets``: of snapshots that are there before this
        call, as the log grows. So this says too much only if its end is that of a leader which is none any more; then
        an older state is the newest snapshot until the next one is made."""
        if max(offsets, default=-1) <= mark.offset:
            return _NOT_CUT
        end = self._end(mark.identity.partition)
        return end if end > mark.offset else _NOT_CUT

    def pieces(self, manifest: Manifest, progress: Callable[[int, int], None]) -> Iterator[bytes]:
        """Yield the blocks of a snapshot, each of which is what it should be. Raises ``SnapshotRefused``, ``OSError``
        and ``Stopped``."""
        identity, done = manifest.mark.identity, 0
        prefix = self.prefix(identity.topic_id, identity.partition)
        for block in manifest.blocks:
            self._go_on()
            try:
                data = self._blobs.get(f"{prefix}/blocks/{block.name}", block.size)
            except FileNotFoundError as error:
                raise SnapshotRefused(f"its block {block.name} is missing") from error
            if len(data) != block.size or hashlib.sha256(data).hexdigest() != block.sha256:
                raise SnapshotRefused(f"its block {block.name} is damaged")
            done += block.size
            progress(done, manifest.mark.size)
            yield data

    def fill(
        self,
        find: Callable[[Callable[[FolderMark], str]], StateFolder],
        identity: LogIdentity,
        refused: set[str],
        progress: Callable[[int, int], None],
        *,
        tombstones_ms: int,
    ) -> str:
        """Fill the folder of a partition, if it is empty, from the newest snapshot that can be used; return the name of
        that, empty if there is none. ``find`` opens the folder, by what says why a mark is not
        to be believed; ``refused``: snapshots that are not tried (again).

        Raises ``OSError`` for a store that does not answer, or a disk that fails; and ``Stopped``.
        """
        prefix = self.prefix(identity.topic_id, identity.partition)

        def refuse(name: str, error: Exception) -> None:
            refused.add(name)
            _log.warning("the snapshot %s/%s is not used: %s", prefix, name, error)

        for name, manifest in self.manifests(prefix, refuse, without=refused):
            ages = {"now_ms": self._wall_ms(), "tombstones_ms": tombstones_ms}
            distrust = distrust_by(identity, **ages)
            folder = find(distrust)
            try:
                try:
                    if folder.check(identity, **ages):
                        return ""
                except Damaged as error:
                    if not set_aside(folder, str(error)):
                        return ""
                if reason := distrust(manifest.mark):
                    raise SnapshotRefused(reason)
                _check_room(folder.path, manifest.mark.size)
                self._write(folder, manifest, progress)
                refused.add(name)  # if the log shows that it is not its beginning, it is not tried again
                return name
            except (SnapshotRefused, Damaged) as error:
                refuse(name, error)
            finally:
                folder.close()
        return ""

    def _write(self, folder: StateFolder, manifest: Manifest, progress: Callable[[int, int], None]) -> None:
        mark, crc = manifest.mark, 0

        def checked() -> Iterator[bytes]:
            nonlocal crc
            for piece in self.pieces(manifest, progress):
                if not crc and not piece.startswith(HEAD):
                    raise Damaged("its data does not begin as such a file does")
                crc = zlib.crc32(piece, crc)
                yield piece
            if crc != mark.crc:
                raise Damaged("its data has another checksum than its mark")

        folder.fill(checked())
        folder.commit(mark.identity, mark.offset, mark.record, mark.as_of_ms)

    # -- writing -------------------------------------------------------------------------------------------------------

    def save(self, mark: FolderMark, pieces: Iterable[bytes]) -> SavedSnapshot:
        """Make a snapshot of what a folder holds at ``mark``. Raises ``OSError``, ``Damaged`` by the pieces, and
        ``Stopped``: there is no new snapshot then, or one that does not count."""
        prefix = self.prefix(mark.identity.topic_id, mark.identity.partition)
        token = secrets.token_hex(8)
        hold = f"{prefix}/{hold_of(token)}"
        source, known = self._newest(prefix)
        # The hold comes before the first block: a collector removes the blocks that neither a hold nor a manifest
        # names.
        self._put(hold, token.encode())
        try:
            blocks, saved = self._write_blocks(prefix, token, known, mark, pieces)
            if not self._is_there(hold):
                raise OSError(
                    f"{prefix}: a snapshot took so long that its hold was removed, and its blocks may be gone"
                )
        except Exception:
            with contextlib.suppress(OSError):
                self._blobs.delete(hold)
            raise
        manifest = Manifest(saved, self._wall_ms(), blocks)
        name = name_of(manifest, token)
        # The manifest comes behind its blocks: a manifest that is there is whole.
        self._put(f"{prefix}/{name}", encode_manifest(manifest, self._secret))  # it may be there, also when this fails
        self._known[f"{prefix}/{name}"] = manifest
        is_reused = any(block.token != token for block in blocks)
        # A collector may have removed that snapshot while this maker stood still, and its blocks with it.
        if is_reused and not self._is_there(f"{prefix}/{source}"):
            # The manifest goes before its hold: without the hold it would count.
            self._blobs.delete(f"{prefix}/{name}")
            self._blobs.delete(hold)
            raise OSError(f"{prefix}: {source}, whose blocks the new snapshot uses, was removed meanwhile")
        try:
            now = next((blob.written_at for blob in self._blobs.list(prefix) if blob.name == name), 0.0)
            # From here on the new snapshot counts.
            self._blobs.delete(hold)
            self._collect(prefix, now, saved)
        except OSError as error:  # the snapshot is there all the same
            _log.warning("%s: old snapshots and blocks stay there until the next one is made: %s", prefix, error)
        return SavedSnapshot(name, saved.size, sum(block.size for block in {*blocks} if block.token == token))

    def _write_blocks(
        self, prefix: str, token: str, known: dict[tuple[str, int], Block], mark: FolderMark, pieces: Iterable[bytes]
    ) -> tuple[tuple[Block, ...], FolderMark]:
        """Write the pieces that are not among the ``known`` blocks; return all blocks, and the mark of them."""
        blocks: list[Block] = []
        size = crc = 0
        for piece in pieces:
            self._go_on()
            key = hashlib.sha256(piece).hexdigest(), len(piece)
            size, crc = size + len(piece), zlib.crc32(piece, crc)
            if key not in known:
                # No name is used twice: a collector that found an older block to be garbage, and stood still, must not
                # remove this one.
                known[key] = block = Block(*key, token)
                self._put(f"{prefix}/blocks/{block.name}", piece)
                self._pace(len(piece))
            blocks.append(known[key])
        return tuple(blocks), msgspec.structs.replace(mark, file="data-1", size=size, crc=crc, live=mark.live or size)

    def _put(self, path: str, data: bytes) -> None:
        """Write an object, and see that it can be read."""
        self._blobs.put(path, data)
        if self._blobs.get(path, len(data)) != data:
            raise OSError(f"{path} is not what was written")

    def _is_there(self, path: str) -> bool:
        try:
            self._blobs.get(path, 0)
        except FileNotFoundError:
            return False
        return True

    def _newest(self, prefix: str) -> tuple[str, dict[tuple[str, int], Block]]:
        """Return the newest snapshot that counts, which is the last one to go, and its blocks that are there: those may
        be used again."""
        names, held = self._list(prefix)
        found = self._read(prefix, (one.name for one in names if one.token not in held), lambda name, error: None)
        if not found:
            return "", {}
        name, manifest = found[0]
        there = {(blob.name, blob.size) for blob in self._blobs.list(f"{prefix}/blocks")}
        return name, {(one.sha256, one.size): one for one in manifest.blocks if (one.name, one.size) in there}

    def _list(self, prefix: str) -> tuple[list[ManifestName], dict[str, float]]:
        """Return the names of the manifests, and the tokens of the holds with the times of their writing."""
        # One list has both: between two lists a hold may go, and its snapshot be passed over.
        blobs = self._blobs.list(prefix)
        held = {token: blob.written_at for blob in blobs if (token := token_of_hold(blob.name))}
        return parsed_names(blob.name for blob in blobs), held

    def _collect(self, prefix: str, now: float, mark: FolderMark) -> None:
        """Remove old snapshots, those of records that the log has lost, and what no snapshot names. Those that cannot
        be read stay, and all blocks with them: what they name is not known. ``now`` is when the store took the new
        manifest, whose mark this is: this machine's clock may be a day ahead, or was when another object was
        written."""

        def refuse(name: str, error: SnapshotRefused) -> None:
            _log.warning("%s/%s stays there, with all blocks, until it is removed by hand: %s", prefix, name, error)

        # The blocks are listed before the names: a block that is written between the two looks is not in the list, and
        # stays.
        blocks = self._blobs.list(f"{prefix}/blocks")
        names, held = self._list(prefix)
        found = self._read(prefix, (one.name for one in names), refuse)
        is_held = {one.name for one in names if one.token in held}
        expired = {token for token, at in held.items() if now - at > HOLD_SECONDS}
        counted = [one for one in found if one[0] not in is_held]
        cut = self.cut_at(mark, (manifest.mark.offset for _, manifest in counted))
        lost = [name for name, manifest in counted if manifest.mark.offset >= cut]
        for name in lost:
            _log.warning("%s/%s is removed: the changelog lost its end, and ended at offset %d", prefix, name, cut)
        for name in lost + superfluous(counted[len(lost) :], self._keep):
            self._blobs.delete(f"{prefix}/{name}")
        for name in [one.name for one in names if one.token in expired]:  # before their holds: they must never count
            self._blobs.delete(f"{prefix}/{name}")
        for token in expired:
            self._blobs.delete(f"{prefix}/{hold_of(token)}")
        if len(found) == len(names):  # else another one was removed meanwhile: who names its blocks now is not known
            ages = ((blob.name, now - blob.written_at) for blob in blocks)
            for block in garbage(ages, (manifest for _, manifest in found), held):
                self._blobs.delete(f"{prefix}/blocks/{block}")

    def _go_on(self) -> None:
        if self._is_over():
            raise Stopped("the source stops")


def open_snapshots(
    config: StateConfig,
    group_id: str,
    topic: str,
    *,
    wall_ms: Callable[[], int],
    pace: Callable[[int], None] = lambda size: None,
    is_over: Callable[[], bool] = lambda: False,
    end: Callable[[int], int] = lambda partition: -1,
) -> SnapshotStore:
    """Open the snapshots that the settings name. Raises ``ConfigError``; connects to nothing yet."""
    secret = read_secret(config.snapshot_secret_file)
    blobs = open_blobs(config.snapshots)
    return SnapshotStore(
        blobs,
        group_id,
        topic,
        wall_ms=wall_ms,
        secret=secret,
        keep=config.snapshots_kept,
        pace=pace,
        is_over=is_over,
        end=end,
    )


def read_secret(path: str) -> bytes:
    """Return the secret in a file, without the spaces around it; none for no path. Raises ``ConfigError``, also for a
    file that other users can read or change."""
    if not path:
        return b""
    try:
        found = read_private(path).strip()
    except OSError as error:
        raise ConfigError(f"StateConfig.snapshot_secret_file cannot be read: {error}") from error
    if len(found) < _TOO_SHORT:
        raise ConfigError(f"StateConfig.snapshot_secret_file: {path} has less than {_TOO_SHORT} bytes of secret")
    return found


def _check_room(path: Path, size: int) -> None:
    """Raise ``SnapshotRefused`` for what a disk cannot hold."""
    found = os.statvfs(path)
    if size > found.f_bavail * found.f_frsize:
        raise SnapshotRefused(f"it has {size} bytes, and {room_at(path)} in {path}")


def _encoded(name: str) -> str:
    """Make a name a part of a path, which leads nowhere else."""
    found = quote(name, safe="")
    return found if found.strip(".") else found.replace(".", "%2E")
