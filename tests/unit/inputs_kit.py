"""Inputs of a simulated source that tell nothing of their ends."""

from __future__ import annotations

from typing import Any

import pytest

from streams.testing.simulation.clients import SimConnections


def silence_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing ever be known of the ends of further inputs: their broker is away, say."""
    taken = SimConnections.further_inputs

    def silent(self: SimConnections, topics: Any) -> Any:
        ports = taken(self, topics)
        for port in ports:
            port._reports_ends = False  # type: ignore[attr-defined]
        return ports

    monkeypatch.setattr(SimConnections, "further_inputs", silent)
