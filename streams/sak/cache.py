"""Folder of downloaded and derived files: one per user, shared by all projects of that user."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_folder() -> Path:
    """The cache folder of this user: ``KES_CACHE_DIR``, else the platform's usual place. It may not exist yet."""
    named = os.environ.get("KES_CACHE_DIR")
    return Path(named).expanduser().absolute() if named else platformdirs.user_cache_path("kafka-event-source")
