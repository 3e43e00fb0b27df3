"""Snapshots of one source in a folder or a store of objects: how they are made, read and removed.

Layout: ``group-G/topic-T/<topic id of the changelog>/<partition>/manifest-...`` and ``.../blocks/<sha-256>``. Blocks
are written first, and read back; the manifest comes last, so one that is there is whole. Two makers at once, or one
that was frozen in between, do no harm: each snapshot by itself is right, and equal blocks have equal names.

Everything here blocks.
"""

from __future__ import annotations

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

from streams.config_groups import StateConfig
from streams.core.checkpoints import FolderMark, LogIdentity, reason_to_distrust
from streams.core.manifests import (
    MOST_MANIFEST,
    Block,
    Manifest,
    ManifestName,
    SnapshotRefused,
    decode_manifest,
    encode_manifest,
    garbage,
    name_of,
    parsed_names,
    ranked,
    superfluous,
)
from streams.disk.blobs import Blobs, open_blobs
from streams.errors import ConfigError, Stopped
from streams.runtime.keeping.entries import HEAD, Damaged
from streams.runtime.keeping.figures import room_at
from streams.runtime.keeping.folder import StateFolder, no_step, set_aside
from streams.sak.private_files import read_private

_log = logging.getLogger(__name__)

_TOO_SHORT: Final = 16
"""Bytes below which a secret is none."""


class SavedSnapshot(NamedTuple):
    """A snapshot that was made: its name, all bytes, and those of them that were not there before."""

    name: str
    size: int
    uploaded: int


class SnapshotStore:
    """The snapshots of one source. ``at`` is called with the name of each step before it is taken; ``is_over`` ends
    whatever is under way by ``Stopped``. One call at a time for each partition."""

    at: Callable[[str], None] = staticmethod(no_step)

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
    ) -> None:
        """``pace`` is called with the bytes of each block that was written, and may wait."""
        self._blobs, self._wall_ms = blobs, wall_ms
        self._secret, self._keep, self._pace, self._is_over = secret, keep, pace, is_over
        self._root = f"group-{_encoded(group_id)}/topic-{_encoded(topic)}"
        self._known: dict[str, Manifest] = {}  # they never change

    def place(self, topic_id: str, partition: int) -> str:
        """Return the folder of a partition."""
        return f"{self._root}/{_encoded(topic_id)}/{partition}"

    # -- reading -------------------------------------------------------------------------------------------------------

    def names(self, place: str) -> list[ManifestName]:
        """Return the names of a partition's manifests, the one that was made last first. Raises ``OSError``."""
        return parsed_names(blob.name for blob in self._blobs.list(place))

    def manifest(self, place: str, name: str) -> Manifest:
        """Return a manifest. Raises ``SnapshotRefused`` and ``OSError``."""
        path = f"{place}/{name}"
        if path not in self._known:
            data = self._blobs.get(path, MOST_MANIFEST)
            if len(data) > MOST_MANIFEST:
                raise SnapshotRefused(f"it is larger than {MOST_MANIFEST} bytes")
            self._known[path] = decode_manifest(data, self._secret)
        return self._known[path]

    def manifests(
        self,
        place: str,
        refuse: Callable[[str, SnapshotRefused], object] = lambda name, error: None,
        *,
        without: Collection[str] = (),
    ) -> list[tuple[str, Manifest]]:
        """Return names and manifests of a partition, the newest state first. ``refuse`` is called with each that
        cannot be read. Raises ``OSError``."""
        found: list[tuple[str, Manifest]] = []
        for _, _, name in self.names(place):
            if name not in without:
                try:
                    found.append((name, self.manifest(place, name)))
                except FileNotFoundError:
                    continue  # a maker has just removed it
                except SnapshotRefused as error:
                    refuse(name, error)
        return ranked(found)

    def has(self, mark: FolderMark) -> bool:
        """Check for a snapshot of the same log and codec that goes as far as this mark. Raises ``OSError``."""
        place = self.place(mark.identity.topic_id, mark.identity.partition)
        marks = [manifest.mark for _, manifest in self.manifests(place)]
        return any(one.identity == mark.identity and one.offset >= mark.offset for one in marks)

    def pieces(self, manifest: Manifest, progress: Callable[[int, int], None]) -> Iterator[bytes]:
        """Yield the blocks of a snapshot, each of which is what it should be. Raises ``SnapshotRefused``, ``OSError``
        and ``Stopped``."""
        identity, done = manifest.mark.identity, 0
        place = self.place(identity.topic_id, identity.partition)
        for block in manifest.blocks:
            self._go_on()
            try:
                data = self._blobs.get(f"{place}/blocks/{block.sha256}", block.size)
            except FileNotFoundError as error:
                raise SnapshotRefused(f"its block {block.sha256} is missing") from error
            if len(data) != block.size or hashlib.sha256(data).hexdigest() != block.sha256:
                raise SnapshotRefused(f"its block {block.sha256} is damaged")
            done += block.size
            progress(done, manifest.mark.size)
            yield data

    def fill(
        self,
        find: Callable[[], StateFolder],
        identity: LogIdentity,
        refused: set[str],
        progress: Callable[[int, int], None],
        *,
        tombstones_ms: int,
    ) -> str:
        """Fill the folder of a partition, if it is empty, from the newest snapshot that can be used; return the name of
        that, empty if there is none. ``find`` opens the folder; ``refused``: snapshots that are not tried (again).

        Raises ``OSError`` for a store that does not answer, or a disk that fails; and ``Stopped``.
        """
        place = self.place(identity.topic_id, identity.partition)

        def refuse(name: str, error: Exception) -> None:
            refused.add(name)
            _log.warning("the snapshot %s/%s is not used: %s", place, name, error)

        for name, manifest in self.manifests(place, refuse, without=refused):
            folder = find()
            try:
                now_ms = self._wall_ms()
                try:
                    if folder.check(identity, now_ms=now_ms, tombstones_ms=tombstones_ms):
                        return ""
                except Damaged as error:
                    if not set_aside(folder, str(error)):
                        return ""
                reason = reason_to_distrust(manifest.mark, identity, now_ms=now_ms, tombstones_ms=tombstones_ms)
                if reason:
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
        self.at("fill")
        folder.commit(mark.identity, mark.offset, mark.record, mark.as_of_ms)

    # -- writing -------------------------------------------------------------------------------------------------------

    def save(self, mark: FolderMark, pieces: Iterable[bytes]) -> SavedSnapshot:
        """Make a snapshot of what a folder holds at ``mark``. Raises ``OSError``, ``Damaged`` by the pieces, and
        ``Stopped``: there is no new snapshot then."""
        place = self.place(mark.identity.topic_id, mark.identity.partition)
        known = self._blocks_of_newest(place) & self._blocks_there(place)
        blocks: list[Block] = []
        size = crc = uploaded = 0
        for piece in pieces:
            self._go_on()
            block = Block(hashlib.sha256(piece).hexdigest(), len(piece))
            blocks.append(block)
            size, crc = size + len(piece), zlib.crc32(piece, crc)
            if block not in known:
                self.at("block")
                self._put(f"{place}/blocks/{block.sha256}", piece)
                known.add(block)
                uploaded += len(piece)
                self._pace(len(piece))
        missing = set(blocks) - self._blocks_there(place)
        if missing:
            raise OSError(f"{place}/blocks: {len(missing)} blocks of a snapshot are not there any more")
        whole = msgspec.structs.replace(mark, file="data-1", size=size, crc=crc, live=mark.live or size)
        manifest = Manifest(whole, self._wall_ms(), tuple(blocks))
        name = name_of(manifest, secrets.token_hex(4))
        self.at("manifest")
        self._put(f"{place}/{name}", encode_manifest(manifest, self._secret))
        self._known[f"{place}/{name}"] = manifest
        self.at("collect")
        try:
            self._collect(place)
        except OSError as error:  # the snapshot is there all the same
            _log.warning("%s: old snapshots and blocks stay there until the next one is made: %s", place, error)
        return SavedSnapshot(name, size, uploaded)

    def _put(self, path: str, data: bytes) -> None:
        """Write an object, and see that it can be read."""
        self._blobs.put(path, data)
        if self._blobs.get(path, len(data)) != data:
            raise OSError(f"{path} is not what was written")

    def _blocks_of_newest(self, place: str) -> set[Block]:
        """Return the blocks that may be used again: those of the newest snapshot, which is the last one to go."""
        return next((set(manifest.blocks) for _, manifest in self.manifests(place)), set())

    def _blocks_there(self, place: str) -> set[Block]:
        return {Block(blob.name, blob.size) for blob in self._blobs.list(f"{place}/blocks")}

    def _collect(self, place: str) -> None:
        """Remove old snapshots, and what no snapshot names. Those that cannot be read stay, and all blocks with them:
        what they name is not known."""
        unreadable: list[str] = []

        def refuse(name: str, error: SnapshotRefused) -> None:
            unreadable.append(name)
            _log.warning("%s/%s stays there, with all blocks, until it is removed by hand: %s", place, name, error)

        readable = self.manifests(place, refuse)
        old = superfluous(readable, self._keep)
        for name in old:
            self._blobs.delete(f"{place}/{name}")
            del self._known[f"{place}/{name}"]
        kept = [manifest for name, manifest in readable if name not in old]
        if not unreadable:
            there = [(blob.name, blob.written_at) for blob in self._blobs.list(f"{place}/blocks")]
            for block in garbage(there, kept, self._wall_ms() / 1000):
                self.at("remove")
                self._blobs.delete(f"{place}/blocks/{block}")

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
) -> SnapshotStore:
    """Open the snapshots that the settings name. Raises ``ConfigError``; connects to nothing yet."""
    secret = read_secret(config.snapshot_secret_file)
    blobs = open_blobs(config.snapshots)
    return SnapshotStore(
        blobs, group_id, topic, wall_ms=wall_ms, secret=secret, keep=config.snapshots_kept, pace=pace, is_over=is_over
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
