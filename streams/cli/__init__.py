"""The command line `kes`: thin commands over the public parts, each in its own module, loaded only when it is called."""

from __future__ import annotations

__all__: list[str] = []
