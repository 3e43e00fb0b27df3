"""The messages of the Kafka protocol that this package speaks, one module for each request and its answer.

Classes and fields have Kafka's names. ``tests/wire/generate.py`` writes the modules; import from them, so that a
program pays for those that it uses.
"""

from __future__ import annotations

__all__: list[str] = []
