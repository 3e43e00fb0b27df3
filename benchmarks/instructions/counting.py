"""Counts every executed bytecode, and every call, by stage. The same number in every run, whatever else the machine
does.

Two ways to the same: Python 3.11 traces (``sys.settrace``), later ones are monitored (``sys.monitoring``; tracing
bytecodes crashes some versions of 3.12).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FrameType, MethodDescriptorType
from typing import Any, Final

from benchmarks.instructions.stages import HARNESS, STAGES, stage_of

Trace = Callable[[FrameType, str, Any], Any]
OUTERMOST: Final = "loop"
"""The stage of functions without a caller that has one."""


class Counts:
    """``bytecodes``, ``calls`` (of Python functions) and ``c_calls`` (of functions and methods of C, but not of
    classes) by stage; ``functions``: bytecodes by stage and function."""

    def __init__(self) -> None:
        self.bytecodes = dict.fromkeys([*STAGES, HARNESS], 0)
        self.calls = dict(self.bytecodes)
        self.c_calls = dict(self.bytecodes)
        self.functions: Counter[tuple[str, str]] = Counter()
        self._known: dict[CodeType, str | None] = {}

    def _stage(self, code: CodeType) -> str | None:
        if code not in self._known:
            self._known[code] = stage_of(code)
        return self._known[code]


class TracingMeter(Counts):
    """A ``drive.Meter`` for Python 3.11."""

    def __init__(self) -> None:
        super().__init__()
        self._stages: dict[object, str] = {}
        """The stages of the functions that trace."""
        self._traces: dict[tuple[CodeType, str], Trace] = {}

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
        stage = self._stage(code)
        if stage is None:
            caller = frame.f_back
            stage = OUTERMOST if caller is None else self._stages.get(caller.f_trace, OUTERMOST)
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

        def trace(frame: FrameType, event: str, _: Any) -> Trace:
            if event == "opcode":
                bytecodes[stage] += 1
                functions[function] += 1
            return trace

        return trace

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "c_call":
            stage = self._stages.get(frame.f_trace)
            if stage is not None:
                self.c_calls[stage] += 1


class MonitoringMeter(Counts):
    """A ``drive.Meter`` for Python 3.12 and newer. It counts all threads."""

    def __init__(self) -> None:
        super().__init__()
        self._stacks: dict[int, list[tuple[CodeType | None, str]]] = {}
        """Of each thread: what was called and has not returned, with its stage."""
        self._is_counting = False

    def begin(self) -> None:
        """Count from now on; what is on its way now counts as the loop's."""
        if sys.version_info >= (3, 12) and not self._is_counting:
            self._is_counting = True
            monitoring = sys.monitoring
            events = monitoring.events
            entered, left = self._entered, self._left
            callbacks = {
                events.PY_START: entered,
                events.PY_RESUME: entered,
                events.PY_THROW: entered,
                events.PY_RETURN: left,
                events.PY_YIELD: left,
                events.PY_UNWIND: left,
                events.INSTRUCTION: self._counter(),
                events.CALL: self._called,
            }
            monitoring.use_tool_id(monitoring.PROFILER_ID, "benchmarks")
            for event, callback in callbacks.items():
                monitoring.register_callback(monitoring.PROFILER_ID, event, callback)
            monitoring.set_events(monitoring.PROFILER_ID, sum(callbacks))

    def end(self) -> None:
        """Stop counting."""
        if sys.version_info >= (3, 12) and self._is_counting:
            self._is_counting = False
            sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
            sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)

    def _stack(self) -> list[tuple[CodeType | None, str]]:
        thread = threading.get_ident()
        stack = self._stacks.get(thread)
        if stack is None:
            stack = self._stacks[thread] = [(None, OUTERMOST)]
        return stack

    def _entered(self, code: CodeType, _offset: int, _thrown: object = None) -> None:
        stack = self._stack()
        stage = self._stage(code) or stack[-1][1]
        stack.append((code, stage))
        self.calls[stage] += 1

    def _left(self, code: CodeType, _offset: int, _value: object) -> None:
        stack = self._stack()
        if stack[-1][0] is code:  # else it was called before the counting began
            stack.pop()

    def _counter(self) -> Callable[[CodeType, int], None]:
        """Build the callback of each bytecode, so it is short."""
        stacks, bytecodes, functions = self._stacks, self.bytecodes, self.functions
        thread, stack_of = threading.get_ident, self._stack

        def executed(code: CodeType, _offset: int) -> None:
            stage = (stacks.get(thread()) or stack_of())[-1][1]
            bytecodes[stage] += 1
            functions[stage, code.co_qualname] += 1

        return executed

    def _called(self, _code: CodeType, _offset: int, function: object, _argument: object) -> None:
        if isinstance(function, BuiltinFunctionType | MethodDescriptorType):
            self.c_calls[self._stack()[-1][1]] += 1


def counting_meter() -> TracingMeter | MonitoringMeter:
    """The one for this interpreter."""
    return MonitoringMeter() if sys.version_info >= (3, 12) else TracingMeter()
