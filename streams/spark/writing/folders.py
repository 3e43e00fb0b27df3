"""The folder where rows are staged: a path, or an address of any store that ``pyarrow.fs`` knows."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final

import pyarrow as pa
from pyarrow import fs as _fs

from streams.errors import ConfigError, StagingError

fs: Any = _fs
_SCHEMES: Final = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_ATTEMPTS: Final = 10
_WRONG: Final = (OSError, pa.ArrowException)


@dataclass(frozen=True)
class StagingFolder:
    """A folder below ``root``, by the names that lead to it. Holds nothing alive: it goes to the tasks by pickle.

    ``root`` is the option ``stagingDir``; the temporary folder when it was left out, which is ``private`` to the user.
    An address may hold a secret, and stays out of ``repr`` and messages.
    """

    root: str = field(repr=False)
    names: tuple[str, ...]
    private: bool

    def __truediv__(self, name: str) -> StagingFolder:
        return replace(self, names=(*self.names, name))

    def __str__(self) -> str:
        return "/".join((shown(self.root), *self.names))

    def create(self) -> tuple[str, Any]:
        """A new file that is open for writing, and its name. Raises ``StagingError``."""
        store, folder = self._opened()
        name = f"{uuid.uuid4().hex}.batches"
        for attempt in range(_ATTEMPTS):
            with self._clear("cannot stage rows under"):
                try:
                    if isinstance(store, fs.LocalFileSystem):
                        self._make_folders(folder)
                    target = store.open_output_stream(f"{folder}/{name}", buffer_size=1 << 20)
                except FileNotFoundError:  # another run has just tidied up an empty folder on the way
                    if attempt == _ATTEMPTS - 1:
                        raise
                    continue
                if isinstance(store, fs.LocalFileSystem):
                    os.chmod(f"{folder}/{name}", self._mode() & 0o666)
                return name, target
        raise AssertionError("unreachable")

    def open(self, name: str) -> Any:
        """A file that ``create`` has made, open for reading. Raises what ``pyarrow`` raises."""
        store, folder = self._opened()
        return store.open_input_stream(f"{folder}/{name}", buffer_size=1 << 20)

    def children(self) -> list[StagingFolder]:
        """The folders in this one; none where it does not exist, or cannot be looked into."""
        try:
            store, folder = self._opened()
            found = store.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        except (*_WRONG, StagingError):
            return []
        return [self / info.base_name for info in found if info.type == fs.FileType.Directory]

    def delete(self, name: str) -> None:
        """Remove one file. Never raises."""
        self._quietly(lambda store, folder: store.delete_file(f"{folder}/{name}"))

    def remove(self) -> None:
        """Remove the folder, and the empty ones between it and the root. Never raises."""
        self._quietly(lambda store, folder: store.delete_dir(folder))
        for count in range(len(self.names) - 1, 0, -1):
            replace(self, names=self.names[:count])._quietly(_remove_empty)

    def _quietly(self, doing: Callable[[Any, str], object]) -> None:
        with contextlib.suppress(*_WRONG, StagingError):
            doing(*self._opened())

    def _opened(self) -> tuple[Any, str]:
        with self._clear("cannot reach the store of"):
            store, base = _opened(self.root)
        return store, "/".join((base.rstrip("/"), *self.names))

    @contextlib.contextmanager
    def _clear(self, doing: str) -> Any:
        try:
            yield
        except _WRONG as error:
            why = reason(error).replace(self.root, shown(self.root))  # it repeats an address that is none
            raise StagingError(f"{doing} {self} (option stagingDir): {why}") from None

    def _make_folders(self, folder: str) -> None:
        """Make the folders, for whom the root is for: its mode is theirs."""
        os.makedirs(_opened(self.root)[1], exist_ok=True)
        at = folder.removesuffix("/" + "/".join(self.names))
        for name in self.names:
            at = f"{at}/{name}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(at, 0o700)
                os.chmod(at, self._mode())  # without the umask, which would keep out the driver's user
            if self.private and name == self.names[0]:
                _check_own(at)

    def _mode(self) -> int:
        return 0o700 if self.private else stat.S_IMODE(os.stat(_opened(self.root)[1]).st_mode) & 0o2777


def staging_folder(given: str | None, identity: str, *, one_machine: bool) -> StagingFolder | None:
    """Return the folder where a write may keep files; ``None`` when there is no place that its tasks and the driver
    share."""
    key = hashlib.sha256(identity.encode()).hexdigest()[:24]
    if given is not None:
        # Without the user: executors may be others than the driver.
        return StagingFolder(given, ("kes-spark", key), private=False)
    if not one_machine:
        return None
    return StagingFolder(tempfile.gettempdir(), (f"kes-spark-{os.getuid()}", key), private=True)


def checked_folder(text: str | None) -> str | None:
    """The option ``stagingDir``; raises ``ConfigError`` for an address that no store is known for."""
    scheme = _ADDRESS.match(text or "")
    if scheme is not None and scheme[1].lower() not in _SCHEMES:
        raise ConfigError(
            f"option stagingDir must be a path that driver and executors have mounted, like /shared/staging, or an "
            f"address that begins with {':, '.join(_SCHEMES)}:, not {shown(text or '')}"
        )
    return text or None


def local_path(root: str) -> str | None:
    """Return the path of an address that every program can open; ``None``: it is one of a store."""
    store, path = _opened(root) if _ADDRESS.match(root) is None or root.lower().startswith("file:") else (None, "")
    return None if store is None else path


def shown(root: str) -> str:
    """An address without what may be secret: user, password (also one whose "/" is not written as %2F), settings."""
    return re.sub(r"(?<=://).*@", "", root).partition("?")[0].rstrip("/")


def reason(error: BaseException) -> str:
    """The text of a store's error."""
    return getattr(error, "strerror", None) or str(error)


@cache
def _opened(root: str) -> tuple[Any, str]:
    if _ADDRESS.match(root) is None:
        return fs.LocalFileSystem(), root
    address = f"file://{root.removeprefix('file:')}" if re.match(r"file:/(?!/)", root) else root
    store, path = fs.FileSystem.from_uri(address)
    return store, path


def _remove_empty(store: Any, folder: str) -> None:
    # Not by other stores: they would take away with the folder what another run has just put into it.
    if isinstance(store, fs.LocalFileSystem):
        os.rmdir(folder)


def _check_own(place: str) -> None:
    """Any user may write into the temporary folder, so ours in it may be another user's: made before, to read along."""
    found = os.lstat(place)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StagingError(
            f"{place} is not this user's: remove it, or give the option stagingDir (a folder of your own)"
        )
    if found.st_mode & 0o077:
        os.chmod(place, 0o700)
