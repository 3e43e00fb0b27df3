"""Counts every executed bytecode, and every call, by stage. The same number in every run, whatever else the machine
does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from benchmarks.instructions.stages import HARNESS, STAGES, stage_of, stages_of_lines

Trace = Callable[[FrameType, str, Any], Any]


class Counter:
    """A ``Meter``. ``bytecodes``, ``calls`` (of Python functions) and ``c_calls`` (of functions and methods of C, but
    not of classes) by stage."""

    def __init__(self) -> None:
        self.bytecodes = dict.fromkeys([*STAGES, HARNESS], 0)
        self.calls = dict(self.bytecodes)
        self.c_calls = dict(self.bytecodes)
        self._traces = {stage: self._trace_of(stage) for stage in self.bytecodes}
        self._stages = {trace: stage for stage, trace in self._traces.items()}
        self._by_code: dict[CodeType, Trace | None] = {}

    def begin(self) -> None:
        """Count what this thread does from now on, in functions that are called or resumed from now on."""
        sys.setprofile(self._profile)
        sys.settrace(self._call)

    def end(self) -> None:
        """Stop counting on this thread."""
        sys.settrace(None)
        sys.setprofile(None)

    def _call(self, frame: FrameType, event: str, _: Any) -> Trace:
        code = frame.f_code
        trace = self._by_code.get(code, self)
        if trace is self:
            trace = self._by_code[code] = self._found(code)
        if trace is None:
            caller = frame.f_back
            trace = None if caller is None else caller.f_trace
            if trace not in self._stages:
                trace = self._traces["loop"]
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        self.calls[self._stages[trace]] += 1
        return trace

    def _found(self, code: CodeType) -> Trace | None:
        lines = stages_of_lines(code)
        if lines is not None:
            trace = self._trace_of_lines(lines)
            self._stages[trace] = "slice"
            return trace
        stage = stage_of(code)
        return None if stage is None else self._traces[stage]

    def _trace_of(self, stage: str) -> Trace:
        counts = self.bytecodes

        def trace(frame: FrameType, event: str, _: Any) -> Trace:
            if event == "opcode":
                counts[stage] += 1
            return trace

        return trace

    def _trace_of_lines(self, lines: dict[int, str]) -> Trace:
        counts = self.bytecodes

        def trace(frame: FrameType, event: str, _: Any) -> Trace:
            if event == "opcode":
                counts[lines[frame.f_lineno]] += 1
            return trace

        return trace

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "c_call":
            stage = self._stages.get(frame.f_trace)
            if stage is not None:
                self.c_calls[stage] += 1
