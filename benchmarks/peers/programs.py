"""The programs of ours that are compiled when first needed, kept in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.systems import Unavailable
from streams.sak.cache import cache_folder

SOURCES: Final = Path(__file__).parent / "programs"
_GO_SECONDS: Final = 600
_PIP_SECONDS: Final = 300


def built(name: str, sources: Sequence[Path], tool: str, build: Callable[[Path], None]) -> Path:
    """Return the folder that ``build`` filled for these very sources and this version of the ``tool``. Raises
    ``Unavailable`` if ``build`` does."""
    key = hashlib.sha256(tool.encode())
    for source in sources:
        key.update(source.name.encode() + source.read_bytes())
    folder = cache_folder() / "peers" / f"{name}-{key.hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="incoming-") as incoming:
        draft = Path(incoming) / name
        draft.mkdir()
        build(draft)
        with contextlib.suppress(FileExistsError):  # another process was quicker
            draft.rename(folder)
    return folder


def go_program(name: str, modules: Mapping[str, str], say: Callable[[str], None]) -> tuple[Path, dict[str, str]]:
    """Return our program of that name, and the versions of these modules and of Go. The first time it is built, and the
    modules it needs are fetched with their checksums (``go.sum``). Raises ``Unavailable``."""
    go, source = shutil.which("go"), SOURCES / name
    if go is None:
        raise Unavailable("there is no go on PATH: install the Go of its go.mod, or newer")
    version = output_of([go, "env", "GOVERSION"], 20, source).strip()
    sources = [source / "go.mod", source / "go.sum", *sorted(source.glob("*.go"))]

    def compiled(folder: Path) -> None:
        say(f"fetching and compiling {name} (a minute or two)")
        output_of([go, "build", "-mod=readonly", "-o", str(folder / name), "."], _GO_SECONDS, source)

    program = built(name, sources, version, compiled) / name
    return program, {**required(sources[0].read_text(), modules), "go": version[2:]}


def python_with(name: str, wanted: Sequence[str], say: Callable[[str], None]) -> Path:
    """Return the interpreter of an environment of its own, with what pip is told to install; made the first time.
    Raises ``Unavailable``."""
    folder = cache_folder() / f"{name}-py{sys.version_info[0]}.{sys.version_info[1]}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not (complete.is_file() and python.is_file()):
        say(f"installing {name}")
        output_of([sys.executable, "-m", "venv", "--clear", str(folder)], _PIP_SECONDS)
        options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
        output_of([str(python), "-m", "pip", "install", *options, *wanted], _PIP_SECONDS)
        complete.touch()
    return python


def required(text: str, modules: Mapping[str, str]) -> dict[str, str]:
    """Find the versions of modules, by name, in a ``go.mod``."""
    found = dict(re.findall(r"^(?:require)?\s*(\S+) v(\S+)", text, re.MULTILINE))
    return {name: found[module] for name, module in modules.items()}


def output_of(command: Sequence[str], seconds: float, folder: Path | None = None) -> str:
    """Run a tool and return its output. Raises ``Unavailable`` with its last line if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise Unavailable(f"{Path(command[0]).name} ended with code {done.returncode}; it said: {last}")
    return done.stdout


def checked(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Check the options. Raises ``Unavailable`` for one that the program would ignore. A known name that ends with a
    dot is the beginning of names."""
    for name in options:
        if not any(name == one or (one.endswith(".") and name.startswith(one)) for one in known):
            raise Unavailable(f"there is no option {name!r}; there are: {', '.join(known)}")
