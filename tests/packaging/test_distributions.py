"""Wheel and source distribution: built, and used in a new environment of each Python that is here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """
import msgspec, sys
from streams import EventContext, EventSource, EventSourceConfig, Table, event_type
from streams.testing import TestDriver

class Ordered(msgspec.Struct, frozen=True):
    customer: str

source = EventSource(
    EventSourceConfig(group_id="orders", topic="orders", num_partitions=2), store=Table.factory(key=str, value=int)
)

@source.on
def on_ordered(ctx: EventContext[Table[str, int]], event: Ordered) -> None:
    ctx.store.put(event.customer, (ctx.store.get(event.customer) or 0) + 1)
    ctx.forward("counts", event, key=event.customer)

def drive():
    with TestDriver(source, members=2) as driver:
        driver.send(Ordered("ann"), key="ann")
        driver.at("commit.before", driver.crash)
        driver.send(Ordered("ann"), key="ann")
        assert driver.outputs("counts", Ordered) == [Ordered("ann")] * 2
        driver.check()

async def drive_in_a_loop():
    drive()

drive()
import asyncio
asyncio.run(drive_in_a_loop())
assert not {"typer", "rich", "pytest"} & {*sys.modules}
"""


def run(*command: object, cwd: Path, code: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["KES_COMPILED_WHEEL"] = "0"  # one wheel for all of these Pythons
    ended = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == code, f"{command}: {ended.stdout}\n{ended.stderr}"
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of this checkout, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    hatch = "import sys; from hatchling.cli import hatchling; sys.exit(hatchling())"
    run(sys.executable, "-c", hatch, "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    (unpacked,) = source.iterdir()
    run(sys.executable, "-c", hatch, "build", "-t", "wheel", "-d", folder, cwd=unpacked)
    return folder


def environment(folder: Path, python: str) -> Path:
    """A new environment of this Python; skips without it, and without a way to the packages."""
    if UV is None:
        pytest.skip("uv, which makes the environments, is not installed")
    kept = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{python}.*/bin/python"))
    made = subprocess.run(
        [UV, "venv", "--no-python-downloads", "--python", kept[-1] if kept else python, folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"Python {python} is not on this machine")
    return folder / "bin"


def install(bin_: Path, *packages: str, **variables: str) -> None:
    assert UV is not None
    command = [UV, "pip", "install", "--quiet", "--python", str(bin_ / "python"), *packages]
    environment = {**os.environ, **variables}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode and ("error sending request" in ended.stderr or "dns error" in ended.stderr):
        pytest.skip("the package registry cannot be reached")
    assert ended.returncode == 0, ended.stderr


def test_the_distributions_hold_what_they_should(built: Path) -> None:
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"streams/py.typed", "streams/broker/jars.json"} <= {*names}
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"streams", "pyspark_grt"}
    assert ("streams/spark/jvm/kes-spark.jar" in names) == (shutil.which("javac") is not None)
    assert wheel.name.endswith("py3-none-any.whl")
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert {"pyproject.toml", "hatch_build.py", "LICENSE", "examples/bank.py", "deploy/systemd/kes@.service"} <= packed


@pytest.mark.parametrize("python", PYTHONS)
def test_the_wheel_works_in_a_new_environment(built: Path, tmp_path: Path, python: str) -> None:
    (wheel,) = built.glob("*.whl")
    bin_ = environment(tmp_path / "venv", python)
    install(bin_, str(wheel))
    (tmp_path / "program.py").write_text(PROGRAM)
    run(bin_ / "python", "-W", "error", "program.py", cwd=tmp_path)
    assert "pip install 'kafka-event-source[cli]'" in run(bin_ / "kes", "--version", cwd=tmp_path, code=1)
    install(bin_, f"{wheel}[cli]")
    assert "kafka-event-source 0." in run(bin_ / "kes", "--version", cwd=tmp_path)
    run(bin_ / "kes", "new", "shop", cwd=tmp_path)
    install(bin_, f"{wheel}[test]")
    assert "passed" in run(bin_ / "python", "-m", "pytest", "-q", cwd=tmp_path / "shop")


@pytest.mark.parametrize(
    ("variables", "said"),
    [({}, "compiled"), ({"CC": "no-such-cc"}, "plain Python (not built: there was no C compiler (no-such-cc) at its")],
    ids=["a compiler", "none"],
)
def test_an_install_from_source_is_compiled_where_a_compiler_is(
    built: Path, tmp_path: Path, variables: dict[str, str], said: str
) -> None:
    (archive,) = built.glob("*.tar.gz")
    bin_ = environment(tmp_path / "venv", "3.12")
    install(bin_, f"{archive}[cli]", UV_NO_CACHE="1", **variables)  # or it takes the wheel that was built before
    assert f", hot path: {said}" in run(bin_ / "kes", "--version", cwd=tmp_path)
    told = run(bin_ / "kes", "doctor", "--bootstrap-servers", "127.0.0.1:1", cwd=tmp_path, code=1)
    assert f"hot path     {said}" in told
    (tmp_path / "program.py").write_text(PROGRAM)
    run(bin_ / "python", "-W", "error", "program.py", cwd=tmp_path)
