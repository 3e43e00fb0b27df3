"""Find the error that a command failed with among the groups that tasks wrap it in."""

from __future__ import annotations

from streams.errors import StreamsError


def innermost(error: Exception) -> Exception:
    """The error to report: of a group, its first ``StreamsError``, or its only error; else ``error`` itself."""
    leaves = list(_leaves(error))
    ours = [leaf for leaf in leaves if isinstance(leaf, StreamsError)]
    if ours:
        return ours[0]
    return leaves[0] if len(leaves) == 1 else error


def _leaves(error: Exception) -> list[Exception]:
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
