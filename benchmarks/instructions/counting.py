"""Counts every executed bytecode, and every call, by stage. The same number in every run, whatever else the machine
does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

from benchmarks.instructions.stages import HARNESS, STAGES, stage_of, stages_of_lines

Trace = Callable[[FrameType, str, Any], Any]

_UNKNOWN: Final = object()


class CountingMeter:
    """A ``drive.Meter``. ``bytecodes``, ``calls`` (of Python functions) and ``c_calls`` (of functions and methods of C,
    but not of classes) by stage; ``functions``: bytecodes by stage and function."""

    def __init__(self) -> None:
        self.bytecodes = dict.fromkeys([*STAGES, HARNESS], 0)
        self.calls = dict(self.bytecodes)
        self.c_calls = dict(self.bytecodes)
        self.functions: Counter[tuple[str, str]] = Counter()
        self._stages: dict[object, str] = {}
        """The stages of the functions that trace."""
        self._traces: dict[tuple[CodeType, str], Trace] = {}
        self._lines: dict[CodeType, dict[int, str]] = {}
        self._own: dict[CodeType, str | None] = {}

    def begin(self) -> None:
        """Count what this thread does from now on, in functions that are called or resumed from now on."""
        sys.setprofile(self._profile)
        sys.settrace(self._call)

    def end(self) -> None:
        """Stop counting on this thread."""
        sys.settrace(None)
        sys.setprofile(None)

    def _call(self, frame: FrameType, _event: str, _: Any) -> Trace:
        code = frame.f_code
        stage = self._own.get(code, _UNKNOWN)
        if stage is _UNKNOWN:
            stage = self._own[code] = stage_of(code)
        if stage is None:
            caller = frame.f_back
            stage = "loop" if caller is None else self._stages.get(caller.f_trace, "loop")
        assert isinstance(stage, str)
        trace = self._traces.get((code, stage))
        if trace is None:
            trace = self._traces[code, stage] = self._trace_of(code, stage)
            self._stages[trace] = stage
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.calls[stage] += 1
        return trace

    def _trace_of(self, code: CodeType, stage: str) -> Trace:
        bytecodes, functions = self.bytecodes, self.functions
        function = stage, code.co_qualname
        lines = stages_of_lines(code)
        if lines is not None:
            self._lines[code] = lines

        def trace(_frame: FrameType, event: str, _: Any) -> Trace:
            if event == "opcode":
                bytecodes[stage] += 1
                functions[function] += 1
            return trace

        def trace_line(frame: FrameType, event: str, _: Any) -> Trace:
            if event == "opcode":
                bytecodes[lines[frame.f_lineno]] += 1  # type: ignore[index]  # it has some
                functions[function] += 1
            return trace_line

        return trace if lines is None else trace_line

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "c_call":
            stage = self._stages.get(frame.f_trace)
            if stage is not None:
                lines = self._lines.get(frame.f_code)
                self.c_calls[stage if lines is None else lines[frame.f_lineno]] += 1
