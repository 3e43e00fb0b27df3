"""Event sources that talk to the world: one pattern per file, each explained in the guides and run by the tests."""

from __future__ import annotations
