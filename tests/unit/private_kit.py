"""Files with secrets in them, as the toolkit accepts them."""

from __future__ import annotations

from pathlib import Path


def private(path: Path, content: str | bytes) -> Path:
    """Write a file that only its owner may read."""
    path.touch(0o600)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
