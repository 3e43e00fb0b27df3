"""The command line in this process: what it answers, what it complains of, and its exit code."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple, Protocol

import pytest

from streams.cli import main


class Answer(NamedTuple):
    out: str
    err: str

    @property
    def words(self) -> str:
        """The complaint, without its frame and line breaks."""
        return " ".join(self.err.replace("│", " ").split())

    @property
    def data(self) -> Any:
        """The answer to ``--json``."""
        return json.loads(self.out)


class Kes(Protocol):
    def __call__(self, *arguments: str, code: int = 0) -> Answer:
        """The answer to ``kes <arguments>``, which ends with this code and never with a stack trace."""


def kes_with(capsys: pytest.CaptureFixture[str]) -> Kes:
    def kes(*arguments: str, code: int = 0) -> Answer:
        capsys.readouterr()
        ended = main.main([*arguments])
        answer = Answer(*capsys.readouterr())
        assert ended == code, answer
        assert "KES_DEBUG" in os.environ or "Traceback" not in answer.err
        return answer

    return kes


def preset(kes: Kes, *first: str) -> Kes:
    """The same for a command whose first words are always these."""
    return lambda *arguments, code=0: kes(*first, *arguments, code=code)
