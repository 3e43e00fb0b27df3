"""Jars beside those of the embedded broker: by coordinates and SHA-256, fetched once into the cache."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path


class NoJar(Exception):
    """A jar cannot be had. The message names it and the reason."""


def jars(listed: Mapping[str, str], folder: Path) -> list[Path]:
    """``listed``: ``group:artifact:version`` -> SHA-256. Out of the folder, or fetched into it, which blocks. Raises
    ``NoJar``."""
    found = []
    for coordinates, digest in listed.items():
        _, artifact, version = coordinates.split(":")
        path = folder / f"{artifact}-{version}.jar"
        if not path.is_file() or _digest(path) != digest:
            _fetch(coordinates, digest, path)
        found.append(path)
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(coordinates: str, digest: str, path: Path) -> None:
    try:
        from jgo.config import GlobalSettings
        from jgo.constants import MAVEN_CENTRAL_URL
        from jgo.maven import MavenContext, PythonResolver
    except ImportError:
        raise NoJar("the package jgo, which fetches jars, is not installed (extra: broker)") from None
    group, artifact, version = coordinates.split(":")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="incoming-") as incoming:
        context = MavenContext(
            repo_cache=Path(incoming),
            remote_repos={"central": MAVEN_CENTRAL_URL, **GlobalSettings.load().repositories},
            resolver=PythonResolver(),
            timeout=30,
        )
        try:
            fetched = context.project(group, artifact).at_version(version).artifact().resolve()
        except (RuntimeError, OSError) as error:  # in no repository; no network
            raise NoJar(f"{coordinates} cannot be fetched: {type(error).__name__}") from error
        if _digest(fetched) != digest:
            raise NoJar(f"{coordinates} arrived with another SHA-256 than the one listed")
        shutil.move(fetched, path)
