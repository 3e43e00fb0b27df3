"""Results that Spark keeps until they are let go."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from pyspark.sql import DataFrame


class Kept:
    """Something with a persisted DataFrame, ``_kept``, that is freed by ``unpersist`` or the end of a ``with``."""

    _kept: DataFrame | None

    def unpersist(self) -> None:
        """Free what is kept: from now on the DataFrames compute everything anew."""
        if self._kept is not None:
            self._kept.unpersist()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpersist()
