"""The parts of a type, as msgspec describes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


def type_nodes(root: Any) -> Iterator[Any]:
    """Yield all type nodes below ``root``; msgspec gives recursive types as cycles."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, tuple | list):
            waiting.extend(node)
        elif isinstance(node, msgspec.inspect.Type | msgspec.inspect.Field) and id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting.extend(getattr(node, field) for field in node.__struct_fields__)
