"""Places for snapshots: a folder, or a store of objects that ``pyarrow.fs`` knows (extra ``snapshots``).

Calls block. Each fails after a time with ``TimeoutError``, whatever the store does, and raises ``OSError`` otherwise.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote

from streams.errors import ConfigError

CALL_SECONDS: Final = 60.0
"""For one call: a block, or a list of names."""
STALE_SECONDS: Final = 86_400.0
"""The age at which half a file, which a killed process has left, is removed."""
_NEW: Final = re.compile(r"\.[0-9a-f]{16}\.new")
_ADDRESS: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")
_SCHEMES: Final = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs")
_SECRETS: Final = re.compile(r"sig|.*(access|secret|password|token|key|signature).*", re.IGNORECASE | re.DOTALL)
"""The names of options that are not given in an address."""

T = TypeVar("T")


class Blob(NamedTuple):
    """One object: the last part of its name, its size in bytes, and the time of its writing (seconds since 1970)."""

    name: str
    size: int
    written_at: float


class Blobs(Protocol):
    """Named bytes, which are written as a whole. Names are relative: letters, digits, ``%._-``, and ``/`` between.
    Raises ``OSError``; ``FileNotFoundError`` for what is not there."""

    def put(self, name: str, data: bytes, /) -> None: ...

    def get(self, name: str, most: int, /) -> bytes:
        """Return an object, and no more than ``most + 1`` bytes of it."""
        ...

    def list(self, folder: str, /) -> list[Blob]:
        """Return the objects right below; none where there is no such folder."""
        ...

    def delete(self, name: str, /) -> None:
        """Remove an object, if it is there."""
        ...


def check_address(address: str) -> None:
    """Raise ``ConfigError`` for an address of no known kind, or with credentials in it, which is not shown then."""
    scheme, plain = _ADDRESS.match(address), unquote(address)
    has_container = scheme is not None and scheme[1].lower() in ("abfs", "abfss")  # abfs://container@account
    # A secret key may have a "/" in it, so what is before an "@" can look like a path.
    has_user = re.search(r"://.*:.*@", plain, re.DOTALL) or (not has_container and re.search(r"://[^/?]*@", plain))
    names = [option.partition("=")[0] for option in re.split(r"[?&;]", plain)[1:]]
    if has_user or any(_SECRETS.fullmatch(name) for name in names):
        advice = "give them to the store's own settings, like AWS_ACCESS_KEY_ID"
        raise ConfigError(f"StateConfig.snapshots has credentials in it: {advice}")
    if scheme is not None and scheme[1].lower() not in (*_SCHEMES, "file"):
        known = ":, ".join(("file", *_SCHEMES))
        raise ConfigError(f"StateConfig.snapshots is {shown(address)!r}; it is a path, or begins with {known}:")


def shown(address: str) -> str:
    """Return an address without its options, which may be secrets."""
    return address.partition("?")[0]


def open_blobs(address: str, *, call_seconds: float = CALL_SECONDS) -> Blobs:
    """Open the place at an address. Raises ``ConfigError``, and ``OSError`` for a store that refuses at once."""
    check_address(address)
    scheme = _ADDRESS.match(address)
    if scheme is None or scheme[1].lower() == "file":
        return _Bounded(_FolderBlobs(Path(re.sub(r"^file:(//(?=/))?", "", address)).absolute()), call_seconds)
    try:
        fs = import_module("pyarrow.fs")
    except ImportError:
        advice = "pip install 'kafka-event-source[snapshots]'"
        raise ConfigError(f"StateConfig.snapshots is {shown(address)!r}, which needs pyarrow: {advice}") from None
    return _Bounded(_ArrowBlobs(fs, address), call_seconds)


class _FolderBlobs:
    """Files below a folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, data: bytes, /) -> None:
        path = self._root / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f".{secrets.token_hex(8)}.new")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def get(self, name: str, most: int, /) -> bytes:
        with open(self._root / name, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)) as file:
            return file.read(most + 1)

    def list(self, folder: str, /) -> list[Blob]:
        found: list[Blob] = []
        try:
            with os.scandir(self._root / folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # it is being removed
                        if not entry.is_file(follow_symlinks=False):
                            continue
                        there = entry.stat(follow_symlinks=False)
                        if not entry.name.startswith("."):
                            found.append(Blob(entry.name, there.st_size, there.st_mtime))
                        elif _NEW.fullmatch(entry.name) and time.time() - there.st_mtime > STALE_SECONDS:
                            with contextlib.suppress(OSError):  # a reader may have no right to
                                os.unlink(entry.path)  # its writer was killed
        except FileNotFoundError:
            return []
        return found

    def delete(self, name: str, /) -> None:
        (self._root / name).unlink(missing_ok=True)


class _ArrowBlobs:
    """Objects below an address, by ``pyarrow.fs``."""

    def __init__(self, fs: Any, address: str) -> None:
        self._fs, self._address = fs, address
        self._opened: tuple[Any, str] | None = None

    @property
    def _store(self) -> tuple[Any, str]:
        if self._opened is None:  # not in the constructor: some look into the network
            try:
                store, path = self._fs.FileSystem.from_uri(self._address)
            except ValueError as error:
                place = shown(self._address)
                why = str(error).replace(self._address, place)
                raise ConfigError(f"StateConfig.snapshots is {place!r}: {why}") from None  # that has all of it
            self._opened = store, path.rstrip("/")
        return self._opened

    def put(self, name: str, data: bytes, /) -> None:
        store, root = self._store
        with store.open_output_stream(f"{root}/{name}") as stream:
            stream.write(data)

    def get(self, name: str, most: int, /) -> bytes:
        store, root = self._store
        with store.open_input_file(f"{root}/{name}") as stream:
            found: bytes = stream.read(most + 1)
        return found

    def list(self, folder: str, /) -> list[Blob]:
        store, root = self._store
        found = store.get_file_info(self._fs.FileSelector(f"{root}/{folder}", allow_not_found=True))
        files = [info for info in found if info.is_file]
        return [Blob(info.base_name, info.size, info.mtime_ns / 1e9 if info.mtime_ns else 0.0) for info in files]

    def delete(self, name: str, /) -> None:
        store, root = self._store
        with contextlib.suppress(FileNotFoundError):  # another maker was faster
            store.delete_file(f"{root}/{name}")


class _Bounded:
    """Gives each call up after a time: on a thread of its own, which then ends by itself or with the process."""

    def __init__(self, blobs: Blobs, seconds: float) -> None:
        self._blobs, self._seconds = blobs, seconds

    def put(self, name: str, data: bytes, /) -> None:
        self._call("put", lambda: self._blobs.put(name, data))

    def get(self, name: str, most: int, /) -> bytes:
        return self._call("get", lambda: self._blobs.get(name, most))

    def list(self, folder: str, /) -> list[Blob]:
        return self._call("list", lambda: self._blobs.list(folder))

    def delete(self, name: str, /) -> None:
        self._call("delete", lambda: self._blobs.delete(name))

    def _call(self, what: str, function: Callable[[], T]) -> T:
        results: list[T] = []
        errors: list[BaseException] = []

        def work() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="kes-blobs", daemon=True)
        thread.start()
        thread.join(self._seconds)
        if results:
            return results[0]
        if not errors:
            raise TimeoutError(f"the store of snapshots has not answered ({what}) for {self._seconds:g} s")
        error = errors[0]
        if isinstance(error, (OSError, ConfigError)):
            raise error
        raise OSError(f"the store of snapshots has failed ({what}): {error!r}") from error
