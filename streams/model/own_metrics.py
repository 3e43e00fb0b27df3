"""Metrics of a source's own: declared by ``source.metric``, counted and observed by its handlers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from streams.errors import ConfigError, StoreError
from streams.sak.numbers import is_number

MetricKind = Literal["counter", "histogram"]
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MOST_VALUES: Final = 100
"""Values of one label that are exported; all others are ``other``."""
OTHER: Final = "other"
_LONGEST_VALUE: Final = 100
_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,99}")
_RESERVED: Final = ("kes_", "process_", "python_", "__")
_SUFFIXES: Final = ("_total", "_count", "_sum", "_bucket", "_created", "_info")


class OwnMetric:
    """One metric. ``labels``: their names, in order. Raises ``ConfigError``."""

    def __init__(
        self, name: str, kind: MetricKind, labels: tuple[str, ...], buckets: tuple[float, ...], help_text: str
    ) -> None:
        _check_name(name)
        if kind not in get_args(MetricKind):
            raise ConfigError(f"the kind of the metric {name} is {kind!r}; it must be 'counter' or 'histogram'")
        given: Any = labels
        if not isinstance(given, tuple) or len(set(given)) < len(given) or not all(map(_is_label, given)):
            raise ConfigError(
                f"labels of the metric {name} is {labels!r}; it must be a tuple of names, each once (not 'group', 'le')"
            )
        bounds: Any = buckets
        if not isinstance(bounds, tuple) or not bounds or not all(is_number(b) and math.isfinite(b) for b in bounds):
            raise ConfigError(f"buckets of the metric {name} is {buckets!r}; it must be a tuple of numbers")
        if list(bounds) != sorted(set(bounds)):
            raise ConfigError(f"buckets of the metric {name} is {buckets!r}; they must rise")
        self.name, self.kind, self.labels, self.help = name, kind, labels, help_text
        self.buckets = tuple(map(float, buckets))
        self._seen: tuple[set[str], ...] = tuple(set() for _ in labels)

    def values(self, kind: MetricKind, amount: object, given: Mapping[str, object]) -> tuple[float, tuple[str, ...]]:
        """Check what a handler gives. Returns the amount, and the values of the labels in their order. Raises
        ``StoreError``."""
        if kind != self.kind:
            raise StoreError(f"the metric {self.name} is a {self.kind}: ctx.{_CALLS[self.kind]} is for it")
        if not is_number(amount) or not math.isfinite(amount) or (kind == "counter" and amount < 0):
            least = "0 or more" if kind == "counter" else "finite"
            raise StoreError(f"the metric {self.name} was given {amount!r}; it must be a number, {least}")
        if given.keys() != set(self.labels):
            raise StoreError(f"the metric {self.name} was given the labels {[*given]}; it has {[*self.labels]}")
        texts = (str(given[name])[:_LONGEST_VALUE] for name in self.labels)
        return float(amount), tuple(text.encode(errors="replace").decode() for text in texts)

    def bounded(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Return the values to export: those of keys would be without number, and fill every store of metrics."""
        found = []
        for seen, value in zip(self._seen, values, strict=True):
            if value not in seen and len(seen) < MOST_VALUES:
                seen.add(value)
            found.append(value if value in seen else OTHER)
        return tuple(found)


_CALLS: Final[Mapping[str, str]] = {"counter": "count", "histogram": "observe"}


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a metric: letters, digits and _, at most 100")
    if name.startswith(_RESERVED) or name.endswith(_SUFFIXES):
        raise ConfigError(
            f"a metric may not be called {name}: exporters have names that begin with {', '.join(_RESERVED)} and end "
            f"with {', '.join(_SUFFIXES)}"
        )


def _is_label(name: object) -> bool:
    is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
    return is_name and name not in ("group", "le", "worker", "quantile") and not str(name).startswith("__")
