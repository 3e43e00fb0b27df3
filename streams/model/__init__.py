"""Vocabulary that users do not import by path, and small helpers that several rooms share.

Vocabulary: ``group``, ``topics``, ``topology``, ``answers``, ``tracing``. Of codecs: ``round_trips``, ``shortcuts``,
``reasons``. Names to modules: ``loading``, ``moved``.
"""

from __future__ import annotations

__all__: list[str] = []
