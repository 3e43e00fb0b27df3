"""Actions: functions of the user's that are started from the pages, one run of each at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
import itertools
import logging
import time
import typing
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from types import UnionType
from typing import Any, Final

import msgspec

from streams.codecs import is_pydantic
from streams.errors import RegistrationError, StreamsError
from streams.looks.records import plain
from streams.sak.harmless import harmless

_log = logging.getLogger("streams.web.actions")

RUNS: Final = 20
"""The last runs of an action that are kept."""
_LONGEST: Final = 2_000
_NONE: Final = type(None)

Action = Callable[..., Awaitable[Any]]


class ActionRefused(StreamsError):
    """An action is not started: its argument cannot be read, it runs already, or there is none of that name."""


class ActionField(msgspec.Struct, frozen=True):
    """A field of an action's argument, as a form shows it. ``kind``: ``text``, ``number``, ``checkbox``, ``select``, or
    ``json`` for anything else."""

    name: str
    kind: str
    is_needed: bool
    default: str = ""
    choices: tuple[str, ...] = ()
    is_whole: bool = False


class ActionRun:
    """One run of an action. An action that takes it as its second argument reports its progress by it."""

    def __init__(self, number: int, action: str, who: str, argument: Any) -> None:
        self.number, self.action, self.who = number, action, who
        self.argument = argument
        self.began_ms = time.time_ns() // 1_000_000
        self.ended_ms: int | None = None
        self.state = "running"
        self.result = ""
        self.done, self.total, self.text = 0, 0, ""
        self.task: asyncio.Task[None] | None = None

    def progress(self, done: int, total: int = 0, text: str = "") -> None:
        """Report how much is done, and of how much (0: not known). Any thread."""
        self.done, self.total, self.text = done, total, text[:_LONGEST]

    def facts(self) -> dict[str, Any]:
        """Return the run as plain data."""
        return {
            "number": self.number,
            "action": self.action,
            "state": self.state,
            "who": self.who,
            "argument": plain(self.argument),
            "began_ms": self.began_ms,
            "ended_ms": self.ended_ms,
            "done": self.done,
            "total": self.total,
            "text": self.text,
            "result": self.result,
        }


class RegisteredAction:
    """An action, its form, and its last runs. On the loop of the monitor."""

    def __init__(self, name: str, function: Action) -> None:
        if not inspect.iscoroutinefunction(function):
            raise RegistrationError(f"the action {name!r} must be an async function")
        parameters = list(inspect.signature(function).parameters.values())
        if len(parameters) > 2:
            raise RegistrationError(f"the action {name!r} takes an argument and its run (ActionRun), at most")
        self.name, self.about = name, (inspect.getdoc(function) or "").partition("\n\n")[0]
        self._function = function
        hints = _hints(function)
        kinds = [hints.get(each.name) for each in parameters]
        self._takes_run = bool(kinds) and kinds[-1] is ActionRun
        kinds = kinds[:-1] if self._takes_run else kinds
        if len(kinds) > 1:
            raise RegistrationError(f"the action {name!r}: its second argument must be an ActionRun")
        self.argument: Any = kinds[0] if kinds else None
        if kinds and not (isinstance(self.argument, type) and _fields_of(self.argument) is not None):
            raise RegistrationError(
                f"the action {name!r}: its argument must have the type of an event: a msgspec.Struct, a dataclass, "
                "or a pydantic model"
            )
        self.fields = [] if self.argument is None else _fields_of(self.argument) or []
        self.runs: deque[ActionRun] = deque(maxlen=RUNS)
        self._numbers = itertools.count(1)

    @property
    def running(self) -> ActionRun | None:
        """Return the run that is under way."""
        return self.runs[0] if self.runs and self.runs[0].ended_ms is None else None

    def start(self, given: Mapping[str, Any], who: str) -> ActionRun:
        """Start a run. ``given``: the argument's fields, as plain data. Raises ``ActionRefused``."""
        if self.running is not None:
            raise ActionRefused(f"{self.name} is running already: cancel that run, or wait for its end")
        argument = None if self.argument is None else _argument(self.argument, given)
        run = ActionRun(next(self._numbers), self.name, who, argument)
        self.runs.appendleft(run)
        run.task = asyncio.create_task(self._run(run))
        run.task.add_done_callback(lambda _: self._ended(run))
        _log.info(
            "action %s, run %d: started by %s: %s", self.name, run.number, who, harmless(str(plain(argument)))[:500]
        )
        return run

    def cancel(self, who: str) -> bool:
        """Cancel the run that is under way. ``False``: there is none."""
        run = self.running
        if run is None or run.task is None:
            return False
        _log.info("action %s, run %d: cancelled by %s", self.name, run.number, who)
        run.task.cancel()
        return True

    async def _run(self, run: ActionRun) -> None:
        arguments = [] if self.argument is None else [run.argument]
        try:
            result = await self._function(*arguments, *([run] if self._takes_run else []))
            run.state, run.result = "done", "" if result is None else str(plain(result))[:_LONGEST]
        except asyncio.CancelledError:
            run.state = "cancelled"
        except (Exception, SystemExit) as error:  # an exit would end the loop of the pages
            run.state, run.result = "failed", f"{type(error).__name__}: {error}"[:_LONGEST]
            _log.warning("action %s, run %d failed", self.name, run.number, exc_info=error)
        finally:
            self._ended(run)

    def _ended(self, run: ActionRun) -> None:
        if run.ended_ms is not None:
            return
        if run.state == "running":  # cancelled before it began
            run.state = "cancelled"
        run.ended_ms = time.time_ns() // 1_000_000
        _log.info("action %s, run %d: %s", self.name, run.number, run.state)


def form_argument(fields: list[ActionField], form: Mapping[str, list[str]]) -> dict[str, Any]:
    """Read the fields of a form as plain data. Raises ``ActionRefused``."""
    found: dict[str, Any] = {}
    for field in fields:
        text = form.get(f"field-{field.name}", [""])[-1]
        if field.kind == "checkbox":
            found[field.name] = bool(text)
        elif text == "" and not field.is_needed:
            continue  # its default
        elif field.kind in ("number", "json"):
            try:
                found[field.name] = msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError):
                wanted = "a number" if field.kind == "number" else "JSON"
                raise ActionRefused(f"{field.name} must be {wanted}") from None
        else:
            found[field.name] = text
    return found


def _hints(function: Action) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        raise RegistrationError(f"the types of {function.__qualname__} are not known: {error}") from error


def _argument(kind: Any, given: Mapping[str, Any]) -> Any:
    try:
        if is_pydantic(kind):
            return kind.model_validate(dict(given))
        return msgspec.convert(dict(given), kind)
    except Exception as error:  # a class of the user's may raise anything
        raise ActionRefused(f"the argument is refused: {error}"[:_LONGEST]) from None


def _fields_of(kind: Any) -> list[ActionField] | None:
    """Return the fields of an event-like class; ``None``: it is none."""
    if is_pydantic(kind):
        return [
            _field(name, each.annotation, each.is_required(), each.default) for name, each in kind.model_fields.items()
        ]
    hints = typing.get_type_hints(kind)
    if issubclass(kind, msgspec.Struct):
        return [
            _field(each.encode_name, hints[each.name], each.required, each.default)
            for each in msgspec.structs.fields(kind)
        ]
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return [
            _field(
                each.name, hints[each.name], each.default is missing and each.default_factory is missing, each.default
            )
            for each in dataclasses.fields(kind)
            if each.init
        ]
    return None


def _field(name: str, kind: Any, is_needed: bool, default: Any) -> ActionField:
    kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, UnionType) else (kind,)
    rest = [each for each in kinds if each is not _NONE]
    inner = rest[0] if len(rest) == 1 else None
    shown = "" if is_needed or default is None or not isinstance(default, str | int | float | enum.Enum) else default
    text = str(shown.value if isinstance(shown, enum.Enum) else shown)
    if inner is bool:
        return ActionField(name, "checkbox", False, "on" if default is True else "")
    if inner is int or inner is float:
        return ActionField(name, "number", is_needed, text, is_whole=inner is int)
    if inner is str:
        return ActionField(name, "text", is_needed, text)
    choices: tuple[Any, ...] = typing.get_args(inner) if typing.get_origin(inner) is typing.Literal else ()
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        choices = tuple(each.value for each in inner)
    if choices and all(isinstance(choice, str) for choice in choices):
        return ActionField(name, "select", is_needed, text, choices)
    return ActionField(name, "json", is_needed)
