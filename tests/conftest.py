from __future__ import annotations

pytest_plugins = ["streams.testing.fixtures"]
