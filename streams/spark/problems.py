"""Sentences about what is wrong with a value, as Spark expressions: null when all is well.

Encoding and decoding both need them: a row that does not fit must be reported by the name of its field, and Spark by
itself would only make it null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as f

from streams.spark.shapes import Mapping, Scalar, Sequence, Shape, Structure

Problem = Callable[[Column, Shape, str], Column | None]
"""(value, its shape, its path) to a sentence or null; ``None`` when nothing can be wrong."""

UUID: Final = r"^[0-9a-fA-F]{8}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{4}-?[0-9a-fA-F]{12}$"


def first(problems: Iterable[Column | None]) -> Column | None:
    """The first sentence that is not null; ``None`` when there is nothing to look at."""
    found = [problem for problem in problems if problem is not None]
    if not found:
        return None
    return found[0] if len(found) == 1 else f.coalesce(*found)


def inside(value: Column, shape: Shape, path: str, problem: Problem) -> Column | None:
    """Return the fault inside of a value: its elements, its fields, or that it is none of the allowed ones."""
    match shape:
        case Scalar(allowed=allowed) if allowed:
            return f.when(~value.isin(*allowed), f.lit(f"{path}: not one of {', '.join(map(str, allowed))}"))
        case Scalar(kind="uuid"):
            whole = value.rlike(UUID) & f.length(value).isin(32, 36)
            return f.when(~whole, f.lit(f"{path}: not a UUID"))
        case Sequence():
            return element(value, shape.item, f"{path}[]", problem)
        case Mapping():
            return element(f.map_values(value), shape.value, f"{path}{{}}", problem)
        case Structure():
            found = first(problem(value[field.name], field.shape, f"{path}.{field.name}") for field in shape.fields)
            return None if found is None else f.when(value.isNotNull(), found)
        case _:
            return None


def element(items: Column, shape: Shape, path: str, problem: Problem) -> Column | None:
    """Return the fault of the first bad element of an array."""
    if problem(f.lit(None), shape, path) is None:
        return None

    def sentence(item: Column) -> Column:
        found = problem(item, shape, path)
        return f.lit(None).cast("string") if found is None else found

    return f.get(f.filter(f.transform(items, sentence), lambda text: text.isNotNull()), 0)
