"""Why a codec has failed: the text of its error, and the error to chain to."""

from __future__ import annotations

from typing import Any, Final, cast

_LONGEST_REASON: Final = 300
"""Characters of a reason, which has to fit a log line."""


def reason(error: BaseException) -> str:
    """Return the error's class and text, cut to fit a log line, without the input that pydantic would show."""
    try:
        if cause(error) is None:
            found: list[Any] = cast(Any, error).errors(include_url=False, include_context=False, include_input=False)
            text = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'value'}: {each['msg']}" for each in found[:5])
        else:
            text = f"{type(error).__name__}: {error}"
    except Exception:  # an exception of the user's class: anything may go wrong in its text
        text = type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[:_LONGEST_REASON] + " ..."


def cause(error: BaseException) -> BaseException | None:
    """Return the error to chain to: none for pydantic's, whose traceback shows the input."""
    return None if hasattr(error, "errors") else error
