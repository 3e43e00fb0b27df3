"""Compiled leaves: found only where they fit, never in the way, and built in one step (``streams/sak/leaves.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hatch_build import CompiledLeaves, first_error
from streams import EventSource, EventSourceConfig
from streams.sak import compiling, leaves
from tests.unit.cli_kit import kes_with

ROOT = Path(__file__).resolve().parents[2]
needs_compiler = pytest.mark.skipif(bool(compiling.missing_tool()), reason=compiling.missing_tool())

THINGS = """
class Thing:
    __slots__ = ("number", "other")

    def __init__(self, number=1, other=2):
        self.number = number
        self.other = other
"""
LEAF = """
from streams.sak import leaves
from streams.things import Thing

CLASSES = (Thing,)


def total(things):
    all = 0
    for thing in things:
        all += thing.number
    return all


def copy(thing):
    thing.other = thing.number


def number(data, end):
    return int.from_bytes(data[0:end], "little")


leaves.use(globals())
"""
TYPES = """
@cython.locals(thing=Thing, all=Py_ssize_t)
cpdef Py_ssize_t total(list things) except -1

cpdef copy(Thing thing)

cpdef number(data, Py_ssize_t end)
"""
USE = """
from streams import leaf
from streams.things import Thing
from streams.sak.leaves import summary
print(summary())
print(type(leaf.total).__name__, leaf.total([Thing(2), Thing(3)]))
def without(field):
    thing = Thing()
    delattr(thing, field)
    return thing
for call in (
    lambda: leaf.total([Thing(), without("number")]),
    lambda: leaf.total([Thing(), None]),
    lambda: leaf.copy(without("number")),
):
    try:
        call()
    except AttributeError as error:
        print(error)
try:
    leaf.copy(without("other"))
except AttributeError as error:
    print("cannot be set:", error)
print(leaf.number(b"\\1\\2\\3", 9))
try:
    print(leaf.number(bytes(8), 8))
except OverflowError as error:
    print(error)
"""
NO_NUMBER = "'Thing' object has no attribute 'number'"
ERRORS = [NO_NUMBER, "'NoneType' object has no attribute 'number'", NO_NUMBER]
IN_PYTHON = ["function 5", *ERRORS, "197121", "0"]
COMPILED = [
    "cython_function_or_method 5",
    *ERRORS,
    "cannot be set: 'Thing' object has no attribute 'other'",
    "197121",
    "compiled code reads numbers of four bytes at most, from a place on",
]


class Mini:
    """A package with the real loader and builder, and one small leaf."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "streams"
        (self.folder / "sak").mkdir(parents=True)
        for name in ("sak/leaves.py", "sak/compiling.py"):
            (self.folder / name).write_text((ROOT / "streams" / name).read_text())
        for name, text in {"__init__.py": "", "sak/__init__.py": "", "things.py": THINGS, "leaf.py": LEAF}.items():
            (self.folder / name).write_text(text)
        (self.folder / "leaf.pxd").write_text(TYPES)

    def start(self, *words: str, **variables: str) -> subprocess.Popen[str]:
        kept = {key: value for key, value in os.environ.items() if key != leaves.PLAIN_VARIABLE}
        environment = {**kept, "PYTHONPATH": str(self.folder.parent), "CFLAGS": "-O0", **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([sys.executable, *words], cwd=self.folder.parent, env=environment, **pipes)

    def run(self, *words: str, **variables: str) -> list[str]:
        process = self.start(*words, **variables)
        text = process.communicate(timeout=60)[0]
        assert process.returncode == 0, text
        return text.splitlines()

    def build(self, **variables: str) -> str:
        return self.run("-m", "streams.sak.compiling", **variables)[-1]

    def use(self, **variables: str) -> list[str]:
        return self.run("-c", USE, **variables)

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name not in ("__pycache__", "sak"))


@pytest.fixture
def mini(tmp_path: Path) -> Mini:
    return Mini(tmp_path)


def test_leaves_are_compiled_where_they_can_be() -> None:
    """In this process, by the setup of ``make test``: else the gate would try the plain path only."""
    if compiling.missing_tool() or os.environ.get(leaves.PLAIN_VARIABLE) == "1":
        pytest.skip(compiling.missing_tool() or leaves.PLAIN_VARIABLE)
    assert leaves.summary() == leaves.COMPILED, "make leaves"
    assert len(leaves.names()) >= 1


def test_without_a_built_file_all_runs_as_it_stands(mini: Mini) -> None:
    assert mini.use() == ["plain Python (not built)", *IN_PYTHON]


@needs_compiler
def test_a_leaf_is_compiled_and_used_until_its_source_changes(mini: Mini) -> None:
    sources = mini.files
    assert "compiled streams.leaf (" in mini.build()
    (built,) = set(mini.files) - set(sources)
    assert mini.use() == ["compiled", *COMPILED]
    assert mini.use(KES_PLAIN="1") == ["plain Python (KES_PLAIN=1)", *IN_PYTHON]
    assert mini.run("-m", "streams.sak.compiling") == []  # nothing to do
    with (mini.folder / "leaf.py").open("a") as file:
        file.write("# changed\n")
    assert mini.use() == ["plain Python (not built)", *IN_PYTHON]
    mini.build()
    (rebuilt,) = set(mini.files) - set(sources)
    assert rebuilt != built
    assert mini.use()[0] == "compiled"


@needs_compiler
@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ('("before", "number", "other")', "the field number of <class 'streams.things.Thing'> is not where it was"),
        ('("__dict__",)', "streams.things.Thing size changed"),
    ],
)
def test_a_leaf_is_not_used_over_classes_that_changed(mini: Mini, slots: str, said: str) -> None:
    """Their source is not the leaf's, so the file is found: it looks itself."""
    mini.build()
    (mini.folder / "things.py").write_text(THINGS.replace('("number", "other")', slots))
    warning, state, *rest = mini.use()
    assert said in warning
    assert state.startswith("plain Python (")
    assert rest == IN_PYTHON
    if "__dict__" in slots:  # such a class has no places that could be compiled
        return
    mini.build()
    assert mini.use() == ["compiled", *COMPILED]


def test_a_file_that_cannot_be_loaded_is_not_used(mini: Mini) -> None:
    leaves.built_file(mini.folder / "leaf.py").write_text("no library")
    warning, state, *rest = mini.use()
    assert "runs as plain Python" in warning
    assert state.startswith("plain Python (")
    assert rest == IN_PYTHON


@needs_compiler
@pytest.mark.nightly
def test_builds_at_the_same_time_do_not_disturb_each_other(mini: Mini) -> None:
    sources = mini.files
    builds = [mini.start("-m", "streams.sak.compiling") for _ in range(2)]
    ended = [(build.communicate(timeout=60)[0], build.returncode) for build in builds]
    assert [code for _, code in ended] == [0, 0], ended
    assert len(set(mini.files) - set(sources)) == 1
    assert mini.use()[0] == "compiled"


def test_without_a_compiler_one_line_says_so(mini: Mini) -> None:
    line = "leaves: {}: the toolkit runs in plain Python, which is complete and slower"
    without_cython = (
        "import sys; sys.modules['Cython'] = None; from streams.sak.compiling import main; sys.exit(main())"
    )
    assert mini.run("-c", without_cython) == [line.format("Cython is not installed")]
    if compiling.missing_tool() != "Cython is not installed":
        assert mini.run("-m", "streams.sak.compiling", CC="no-such-compiler") == [
            line.format("there is no C compiler (no-such-compiler)")
        ]


def test_the_command_compiles_in_place_or_says_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = EventSource(EventSourceConfig(group_id="g", topic="t", num_partitions=1))
    assert source.statistics().hot_path == leaves.summary()
    kes = kes_with(capsys)
    if leaves.summary() == leaves.COMPILED:
        assert kes("compile").lines == ["hot path: compiled"]
    monkeypatch.setattr(compiling, "missing_tool", lambda: "Cython is not installed")
    monkeypatch.setattr(leaves, "summary", lambda: "plain Python (not built)")
    said = kes("compile", code=1).words
    assert "the hot path cannot be compiled: Cython is not installed" in said
    assert "pip install 'kafka-event-source[compile]'" in said


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ("plain: there was no C compiler (cc) at its build", "not built: there was no C compiler (cc) at its build"),
        ("compiled: msgspec 0.0.1, cython 3.2", "not built"),
        (None, "not built"),
    ],
)
def test_plain_python_says_why_it_is(mini: Mini, note: str | None, said: str) -> None:
    if note is not None:
        (mini.folder / "sak/built.txt").write_text(f"{note}\nwith the jar for Spark\n")
    assert mini.use()[0] == f"plain Python ({said})"
    script = "import streams.leaf; from streams.sak.leaves import advised; print(advised())"
    assert mini.run("-c", script)[0].endswith(f"({said}); kes compile makes it the compiled one, which is faster")
    assert mini.run("-c", script, KES_PLAIN="1")[0].endswith(
        "; without KES_PLAIN=1 it may run compiled, which is faster"
    )


def test_a_compiled_leaf_that_does_not_fit_names_both_versions(mini: Mini) -> None:
    (mini.folder / "sak/built.txt").write_text("compiled: msgspec 0.0.1, cython 3.2\n")
    leaves.built_file(mini.folder / "leaf.py").write_text("no library")
    here = f"; compiled: msgspec 0.0.1, cython 3.2, and here is msgspec {version('msgspec')})"
    assert mini.use()[1].endswith(here)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"CC": "no-such-cc"}, "there was no C compiler (no-such-cc) at its build"),
        ({"KES_COMPILED_WHEEL": "0"}, "KES_COMPILED_WHEEL=0 was set for its build"),
        ({"CC": "no-such-cc", "KES_COMPILED_WHEEL": "1"}, ""),
    ],
)
def test_a_wheel_of_plain_python_says_why_and_is_refused_where_a_compiled_one_is_demanded(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reason: str
) -> None:
    monkeypatch.delenv("KES_COMPILED_WHEEL", raising=False)
    monkeypatch.setenv("KES_SPARK_JAR", "0")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    data: dict[str, Any] = {"force_include": {}}
    hook: Any = CompiledLeaves(str(ROOT), {}, None, None, "", "wheel")  # type: ignore[arg-type]
    assert hook.dependencies() == [], "nothing is fetched in vain"
    if not reason:
        with pytest.raises(SystemExit, match=r"KES_COMPILED_WHEEL=1 demands a compiled wheel, and there was no C comp"):
            hook.initialize("standard", data)
        return
    hook.initialize("standard", data)
    ((note, place),) = data.pop("force_include").items()
    told = f"plain: {reason}\nno jar for Spark: KES_SPARK_JAR=0 was set for its build\n"
    assert (Path(note).read_text(), place, data) == (told, "streams/sak/built.txt", {})
    hook.finalize("standard", data, "")
    assert not Path(note).exists()


def test_a_build_that_fails_says_why_in_a_sentence() -> None:
    ended = "setuptools.CompileError: Command '['cc', '-I/tmp/x', 'a.c']' returned non-zero exit status 1."
    missing = "/tmp/leaves-1/a.c:23:10: fatal error: Python.h: No such file or directory\n   23 | #include"
    assert first_error(f"{missing}\nerror: this one is later\n{ended}") == "Python.h: No such file or directory"
    assert first_error(f"Traceback\n{ended}") == "setuptools.CompileError: its command returned non-zero exit status 1."


@needs_compiler
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("compiled", "tag"), [("0", "py3-none-any"), ("1", "cp3")])
def test_wheels_with_and_without_compiled_leaves(mini: Mini, tmp_path: Path, compiled: str, tag: str) -> None:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--quiet", "--no-deps"]
    environment = {**os.environ, "KES_COMPILED_WHEEL": compiled, "PYTHONPATH": str(ROOT)}
    words = [*pip, "--wheel-dir", str(tmp_path / "dist"), str(ROOT)]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    assert f"-{tag}" in wheel.name
    assert "pyspark_grt/__init__.py" in zipfile.ZipFile(wheel).namelist()  # what Spark finds by itself
    mini.folder = tmp_path / "installed" / "streams"
    zipfile.ZipFile(wheel).extractall(mini.folder.parent)
    (version,) = mini.run("-m", "streams", "--version")
    plain = (
        "plain Python (not built: KES_COMPILED_WHEEL=0 was set for its build); kes compile makes it the compiled one"
    )
    assert f"hot path: {'compiled' if compiled == '1' else plain}" in version
