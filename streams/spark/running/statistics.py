"""The figures of a pipeline: of each of its queries, and of the pipeline itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

State = Literal["waiting", "running", "finished", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryStatistics:
    """One query of a pipeline. ``batch`` and what follows are of its last batch, and ``None`` before the first;
    ``lag`` is ``None`` where the sources do not say their latest offsets."""

    name: str
    state: State
    starts: int
    error: str
    batch: int | None = None
    rows: int | None = None
    batch_seconds: float | None = None
    input_rows_per_second: float | None = None
    processed_rows_per_second: float | None = None
    lag: int | None = None


class PipelineStatistics(Protocol):
    """The part of a ``Pipeline`` that its metrics read. From any thread."""

    @property
    def name(self) -> str:
        """Return the name of the pipeline."""
        ...

    def statistics(self) -> list[QueryStatistics]:
        """Return the queries as they were at the last check."""
        ...

    def silent_seconds(self) -> float:
        """Return how long ago the last check was."""
        ...
