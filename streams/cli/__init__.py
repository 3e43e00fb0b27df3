"""The command line `kes`: thin commands over the public parts, each a module, loaded when it is called."""

from __future__ import annotations

__all__: list[str] = []
