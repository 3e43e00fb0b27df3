"""Groups, dead letters, records and settings as data and in words: what the command line and the monitor both show.

Nothing here draws: tables are of ``cli``, pages of ``web``.
"""

from __future__ import annotations

__all__: list[str] = []
