"""Swiss army knife: small general tools that import nothing of ours."""

from __future__ import annotations

__all__: list[str] = []
