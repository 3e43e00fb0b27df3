"""The headers of received records, as ``IncomingRecord`` keeps them."""

from __future__ import annotations

from typing import Any

from streams.records import ReceivedHeaders

_MOST_SHARED = 1024
"""Headers that are kept to be shared."""
_shared: dict[ReceivedHeaders, ReceivedHeaders] = {}


def received(headers: Any) -> ReceivedHeaders | None:
    """Return ``Message.headers()`` as a tuple. Single headers, which are types as a rule, are one tuple for all
    records that have them, so that they can be compared by identity (``runtime.hot_path``).

    Any thread: at worst two of them keep a tuple each for a while.
    """
    if headers is None:
        return None
    found = tuple(headers)
    if len(found) != 1:
        return found
    if len(_shared) >= _MOST_SHARED:  # not types, but something that each record has of its own
        _shared.clear()
    return _shared.setdefault(found, found)
