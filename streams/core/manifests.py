"""Manifests of snapshots: what a snapshot is made of, and what of them is kept. Pure.

A snapshot is the data of a folder in blocks, which are named by their SHA-256 and by their maker's token, and a
manifest that lists them. What a manifest says is believed only after its own digest fits; with a secret that is an
HMAC, which cannot be forged. While a snapshot is made there is a *hold* with the maker's token. It keeps the blocks of
this token, and a manifest of this token does not count before the hold is gone.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from streams.core.checkpoints import FolderMark

MANIFEST_FORMAT: Final = 1
"""The layout of a manifest. One of another layout is not read."""
BLOCK_BYTES: Final = 4 << 20
"""Bytes of each block of a snapshot but for the last one, which may have fewer."""
MOST_BLOCK: Final = 64 << 20
"""Bytes of the largest block that is read."""
MOST_MANIFEST: Final = 32 << 20
"""Bytes of the largest manifest that is read."""
GARBAGE_SECONDS: Final = 3600.0
"""Seconds of age at which a block that nothing names is removed. A folder on a network may show names a minute late."""
HOLD_SECONDS: Final = 86_400.0
"""Seconds of age at which a hold is removed: its maker was killed. A maker that is still at work begins anew."""

_HEAD: Final = re.compile(rb"kes-snapshot (\d{1,9}) (sha256|hmac) ([0-9a-f]{64})\n")
_BLOCK: Final = re.compile(r"[0-9a-f]{64}(?:-([0-9a-f]{1,32}))?")
_NAME: Final = re.compile(r"manifest-(\d{15})-(\d{1,19})-([0-9a-f]{1,32})")
_HOLD: Final = re.compile(r"hold-([0-9a-f]{1,32})")


class SnapshotRefused(Exception):
    """A snapshot is not used. The text completes the sentence "it is not used, because"."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A piece of the data, by its hash. ``token``: of the snapshot that it was written for. So its name is never used
    again, and the removal of it, however late, takes nothing that is newer."""

    sha256: str
    size: int
    token: str = ""

    @property
    def name(self) -> str:
        """Return the name of its object."""
        return f"{self.sha256}-{self.token}" if self.token else self.sha256


class Manifest(msgspec.Struct, frozen=True):
    """One snapshot: the ``mark`` of a folder, and the blocks that its data file is made of, in their order."""

    mark: FolderMark
    made_at_ms: int
    blocks: tuple[Block, ...]


class ManifestName(NamedTuple):
    """The parts of a manifest's name: for the eye, and to see when one was made. Nothing to believe."""

    made_at_ms: int
    offset: int
    name: str
    token: str


def hold_of(token: str) -> str:
    """Name a hold; ``token``: hexadecimal digits that no other snapshot has."""
    return f"hold-{token}"


def token_of_hold(name: str) -> str:
    """Return the token in the name of a hold, nothing for another name."""
    found = _HOLD.fullmatch(name)
    return found[1] if found else ""


def name_of(manifest: Manifest, token: str) -> str:
    """Name a manifest; ``token``: that of its hold."""
    return f"manifest-{manifest.made_at_ms:015d}-{manifest.mark.offset}-{token}"


def parsed_names(names: Iterable[str]) -> list[ManifestName]:
    """Return the manifests among these names, the one that was made last first."""
    found = [(match, name) for name in names if (match := _NAME.fullmatch(name)) is not None]
    return sorted((ManifestName(int(match[1]), int(match[2]), name, match[3]) for match, name in found), reverse=True)


def is_block(name: str) -> bool:
    """Check for the name of a block: nothing else is fetched or removed."""
    return _BLOCK.fullmatch(name) is not None


def encode_manifest(manifest: Manifest, secret: bytes) -> bytes:
    """Encode a manifest, behind its digest."""
    text = msgspec.json.encode(manifest)
    return (
        b"kes-snapshot %d %s %s\n" % (MANIFEST_FORMAT, b"hmac" if secret else b"sha256", _digest(text, secret)) + text
    )


def decode_manifest(data: bytes, secret: bytes) -> Manifest:
    """Decode a manifest whose digest fits. Raises ``SnapshotRefused``."""
    head = _HEAD.match(data)
    if head is None:
        raise SnapshotRefused("it is no manifest")
    if int(head[1]) != MANIFEST_FORMAT:
        raise SnapshotRefused(f"it has the format {int(head[1])}, and this version reads {MANIFEST_FORMAT}")
    is_signed, text = head[2] == b"hmac", data[head.end() :]
    # Also an unsigned one with a secret: a forger could leave the signature out.
    if is_signed != bool(secret):
        wanted = "it is signed, and StateConfig.snapshot_secret_file is not set" if is_signed else "it is not signed"
        raise SnapshotRefused(wanted)
    # Before anything is decoded, and in constant time: how long it takes says nothing about the right signature.
    if not hmac.compare_digest(head[3], _digest(text, secret)):
        raise SnapshotRefused("its signature is wrong" if is_signed else "its checksum is wrong")
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SnapshotRefused(f"it cannot be read ({error})") from error
    for block in manifest.blocks:
        if not is_block(block.name):  # the name is fetched: it must not lead anywhere else
            raise SnapshotRefused(f"it names the block {block.name[:120]!r}")
        if not 0 < block.size <= MOST_BLOCK:
            raise SnapshotRefused(f"it has a block of {block.size} bytes")
    if sum(block.size for block in manifest.blocks) != manifest.mark.size:
        raise SnapshotRefused(f"its blocks are not the {manifest.mark.size} bytes of its mark")
    return manifest


def ranked(found: Iterable[tuple[str, Manifest]]) -> list[tuple[str, Manifest]]:
    """Return names and manifests, the one with the newest state first: by their marks, which are under the digest, as
    the offset in a name is not. When one was made says nothing: also an older state can be saved later."""
    return sorted(found, key=lambda one: (one[1].mark.offset, one[1].made_at_ms, one[0]), reverse=True)


def superfluous(found: Sequence[tuple[str, Manifest]], keep: int) -> list[str]:
    """Return the names of the manifests that are not kept any more; ``found``: as ``ranked``."""
    return [name for name, _ in found[keep:]]


def garbage(blocks: Iterable[tuple[str, float]], named: Iterable[Manifest], held: Collection[str]) -> list[str]:
    """Return the names of the blocks that can be removed. ``blocks``: names and ages in seconds, listed before
    manifests and holds were; ``named``: all manifests, also those that are removed just now; ``held``: tokens."""
    names: Collection[str] = {block.name for manifest in named for block in manifest.blocks}
    # Ages are older than the lists that they are compared with. The other way round, a block of a snapshot that was
    # made in between would be old, and not listed.
    old = ((name, _BLOCK.fullmatch(name)) for name, age in blocks if age > GARBAGE_SECONDS)
    return [name for name, match in old if match and name not in names and match[1] not in held]


def _digest(text: bytes, secret: bytes) -> bytes:
    if secret:
        return hmac.new(secret, text, hashlib.sha256).hexdigest().encode()
    return hashlib.sha256(text).hexdigest().encode()
