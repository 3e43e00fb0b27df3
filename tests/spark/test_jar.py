"""The jar of tasks in Java, and the process beside it that commits: does it fit, and does it live? No Spark, no JDK."""

from __future__ import annotations

import io
import json
import os
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from streams.cli import machine_checks
from streams.cli import spark as cli
from streams.errors import ConfigError
from streams.sak import spark_jar
from streams.spark import session
from streams.spark.jvm import committing
from streams.spark.source import LocalGrtDataSource

pytestmark = pytest.mark.spark

SPARK = pyspark.__version__
DIGEST, LINE = spark_jar.built_with(SPARK).split()


@pytest.fixture
def jar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The place of the jar in an installation that has none yet."""
    path = tmp_path / spark_jar.JAR.name
    monkeypatch.setattr(spark_jar, "JAR", path)
    return path


def pack(path: Path, **files: str) -> None:
    with zipfile.ZipFile(path, "w") as packed:
        for name, text in files.items():
            packed.writestr(f"kes/spark/{name}.txt", text)


def asked(jars: dict[str, str], spark: str = SPARK) -> tuple[str, str]:
    """Return the refusal of a plan."""
    question: dict[str, Any] = {"do": "plan", "jars": jars, "spark": spark}
    (refused, _) = committing.answer([json.dumps(question).encode()])
    kind, text = json.loads(refused)["error"]
    return kind, text


@pytest.mark.parametrize(
    ("built", "why", "state"),
    [
        (None, "this installation has no kes-spark.jar", "ok"),
        (b"no archive", "kes-spark.jar cannot be read (File is not a zip file)", "warning"),
        ({"other": ""}, "kes-spark.jar cannot be read (", "warning"),
        ({"built": f"0123 {LINE}"}, "is of another release than the Python package kafka-event-source", "warning"),
        ({"built": f"{DIGEST} 3.9"}, f"was built with Spark 3.9, and this is Spark {LINE}", "warning"),
        ({"built": DIGEST}, "was built with Spark (not known), and this is", "warning"),
    ],
    ids=["none", "damaged", "empty", "another release", "another Spark", "from before"],
)
def test_a_jar_that_does_not_fit(jar: Path, built: Any, why: str, state: str) -> None:
    """Python encodes then, the session is as it would be without, and all doors say why."""
    if isinstance(built, bytes):
        jar.write_bytes(built)
    elif built is not None:
        pack(jar, **built)
    assert session._with_our_jar("a.jar", None) == session._with_our_jar("a.jar", "python") == "a.jar"
    with pytest.raises(ConfigError) as demanded:
        session._with_our_jar("a.jar", "java")
    with pytest.raises(ConfigError) as shown:
        cli.jar()
    (finding,) = machine_checks.spark_tasks()
    assert finding.state == state
    for text in (str(demanded.value), str(shown.value), f"{finding.text}; {finding.remedy}"):
        assert why in text
        assert "with a JDK here, `python -m streams.sak.spark_jar` makes it" in text


def test_a_jar_that_fits(jar: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack(jar, built=f"{DIGEST} {LINE}")
    assert session._with_our_jar("", None) == str(jar)
    assert session._with_our_jar("a.jar", "java") == f"a.jar,{jar}"
    assert session._with_our_jar("a.jar", "python") == "a.jar"
    given = "/other/kes-spark.jar,a.jar"
    assert session._with_our_jar(given, None) == given, "the given one is judged when a write is planned"
    cli.jar()
    assert capsys.readouterr().out.strip() == str(jar)
    (finding,) = machine_checks.spark_tasks()
    assert (finding.state, finding.text) == ("ok", f"Spark {SPARK}: tasks that write encode in Java")


class OtherSession:
    """A session that was made elsewhere: its Java, its settings and its application."""

    version = SPARK

    def __init__(self, application: str, on_class_path: bool, **settings: str) -> None:
        self.sparkContext = SimpleNamespace(applicationId=application)
        self.conf = SimpleNamespace(get=lambda name, default: settings.get(name.rpartition(".")[2], default))
        loader = SimpleNamespace(getResource=lambda name: name if on_class_path else None)
        thread = SimpleNamespace(getContextClassLoader=lambda: loader)
        lang = SimpleNamespace(Thread=SimpleNamespace(currentThread=lambda: thread))
        self._jvm = SimpleNamespace(java=SimpleNamespace(lang=lang))


def test_one_line_of_the_log_says_that_python_encodes(jar: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made: list[Any] = [OtherSession("a", False), OtherSession("a", False), OtherSession("b", True)]
    made += [OtherSession("c", False, tasks="python"), SimpleNamespace(), OtherSession("d", False)]
    for each in made[:-1]:
        session._tell_who_encodes(each)
    pack(jar, built=f"{DIGEST} {LINE}")
    session._tell_who_encodes(made[-1])
    first, second = [record.getMessage() for record in caplog.records if record.name == session.__name__]
    assert first.startswith("tasks that write encode in Python, which is slower than in Java: this installation has no")
    assert first.endswith(spark_jar.ADVICE)
    assert second.endswith(f"{jar} is not in the setting spark.jars")


def test_jars_on_the_class_path_are_judged_when_a_write_is_planned() -> None:
    fits = f"{DIGEST} {LINE}"
    kind, text = asked({"file:/a.jar": fits, "file:/b.jar": f"0123 {LINE}"})
    assert kind == "ConfigError"
    assert "file:/b.jar on Spark's class path is of another release than the Python package" in text
    assert "file:/a.jar on Spark's class path was built with Spark" in asked({"file:/a.jar": fits}, "9.9.0")[1]
    assert asked({"file:/a.jar": fits, "file:/b.jar": fits})[1].startswith("KeyError: "), "twice the same does no harm"
    options = {"topic": "t", "sink": "s", "bootstrap.servers": "localhost:1", "tasks": "JAVA"}
    for make in (LocalGrtDataSource(options).writer, LocalGrtDataSource(options).streamWriter):
        with pytest.raises(ConfigError, match="option tasks=java: this session does not have"):
            make(None, overwrite=False)  # type: ignore[arg-type]


def test_signs_of_life_between_answers() -> None:
    """Also while it is asked nothing. When its input ends, it does: its driver is gone."""
    theirs, mine = os.pipe()
    source, release = io.BytesIO(), threading.Event()

    class Driver:
        """Asks one thing, and is gone once it is released."""

        def read(self, size: int) -> bytes:
            if not (found := source.read(size)):
                assert release.wait(30)
            return found

    request = json.dumps({"do": "nothing"}).encode()
    size = committing._SIZE
    source.write(committing._HEAD.pack(7, 1) + size.pack(len(request)) + request)
    source.seek(0)
    with os.fdopen(theirs, "rb") as answers, os.fdopen(mine, "wb") as out:
        serving = threading.Thread(target=committing.serve, args=(Driver(), out, 0.01), daemon=True)
        serving.start()
        beats, replies = 0, list[tuple[int, str, bytes]]()
        while beats < 20 or not replies:
            (number,) = size.unpack(answers.read(size.size))
            if number == committing.BEAT:
                beats += 1
                continue
            parts = [answers.read(size.unpack(answers.read(size.size))[0]) for _ in range(2)]
            replies.append((number, json.loads(parts[0])["error"][0], parts[1]))
        release.set()
        serving.join(30)
        assert not serving.is_alive()
    assert replies == [(7, "StreamsError", b"")]
