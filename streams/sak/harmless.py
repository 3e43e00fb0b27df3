"""Text that may hold anything, for terminals and their readers."""

from __future__ import annotations


def harmless(data: bytes | str | None, keep: str = "") -> str:
    """Return text in which everything that a terminal could obey, or a reader overlook, is an escape like ``\\x1b``,
    apart from the characters in ``keep``."""
    if data is None:
        return "null"
    text = data.decode(errors="backslashreplace") if isinstance(data, bytes) else data
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in text
    )
