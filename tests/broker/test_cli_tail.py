"""``kes tail`` on a real broker: what is committed, from where on, and harmless whatever it is."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from streams.cli import main
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.looks import scans
from streams.model.topics import TopicSpec
from streams.testing.fixtures import BrokerAddress
from tests.broker.client_kit import Writer, writing
from tests.broker.engine_kit import Lab, source_of
from tests.broker.kes_kit import Kes
from tests.vocabulary import ADDED, added

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]

PATIENCE = 60.0
T0 = 1_700_000_000_000


@pytest.fixture(scope="module")
def topic(kafka_broker: BrokerAddress) -> Iterator[str]:
    """Two partitions: committed, aborted and open transactions, binary keys, escapes; a second between two records."""
    name = "tail-of-all-kinds"
    settings = ClientSettings(kafka_broker.bootstrap_servers)
    admin = TopicAdmin(settings)
    admin.create([TopicSpec(name=name, partitions=2, replication_factor=1)])
    with writing(settings, name) as writer:
        send(writer, 0, *range(5))
        writer.commit()
        send(writer, 0, 90, 91)
        writer.abort()
    with writing(settings, name) as writer:
        send(writer, 1, 5, 6, key=b"\x1b[31m\xff", value=b"<script>\x1b]0;evil\x07 [bold]")
        writer.commit()
        send(writer, 1, 92)  # stays open
        yield name
    admin.delete([name])
    admin.close()


def send(writer: Writer, partition: int, *numbers: int, key: bytes | None = None, value: bytes | None = None) -> None:
    writer.begin()
    headers: list[tuple[str, str | bytes | None]] = [*ADDED, ("n", b"%d" % numbers[0])]
    for number in numbers:
        data = added(f"n{number}") if value is None else value
        name = b"k%d" % (number % 2) if key is None else key
        writer.producer.produce(writer.topic, data, name, partition, timestamp=T0 + number * 1_000, headers=headers)
    assert not writer.producer.flush(PATIENCE)


@pytest.fixture
def shown(
    topic: str, kafka_broker: BrokerAddress, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """The places that ``kes tail`` shows with these words."""
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", kafka_broker.bootstrap_servers)

    def run(*words: str) -> list[str]:
        code = main.main(["tail", topic, *words, "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        found = [json.loads(line) for line in out.splitlines()]
        return [f"{record['partition']}@{record['offset']}" for record in found]

    return run


def moment(seconds: int) -> str:
    return datetime.fromtimestamp(T0 / 1000 + seconds, UTC).isoformat()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["0@0", "0@1", "0@2", "0@3", "0@4", "1@0", "1@1"]),
        (["-n", "3"], ["0@4", "1@0", "1@1"]),
        (["-n", "1", "-p", "0"], ["0@4"]),
        (["--key", "k1"], ["0@1", "0@3"]),
        (["--key", "k1", "-n", "1"], ["0@3"]),
        (["--from", "0@3"], ["0@3", "0@4"]),
        (["--from", "0@1", "-n", "2"], ["0@1", "0@2"]),
        (["--from", "0", "--until", "0@2"], ["0@0", "0@1"]),
        (["--from", "999"], []),
        (["--from", "0", "--until", "0"], []),
        (["--from", moment(3), "-p", "0"], ["0@3", "0@4"]),
        (["--from", moment(1), "--until", moment(4), "-p", "0"], ["0@1", "0@2", "0@3"]),
        (["--from", "1s"], []),
        (["--until", "0@2"], ["0@0", "0@1"]),
    ],
)
def test_what_is_chosen_is_shown(shown: Callable[..., list[str]], words: list[str], expected: list[str]) -> None:
    assert sorted(shown(*words)) == expected


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--from", "yesterday"], 2, "'yesterday' is not an offset, PARTITION@OFFSET, a time"),
        (["-p", "7"], 1, "has the partitions 0 to 1, not 7"),
        (["--from", "5@1"], 1, "has the partitions 0 to 1, not 5"),
        (["--from", "0@1", "--until", "1@1"], 2, "more than one partition is named"),
        (["--follow", "--until", "3"], 2, "--follow cannot have an end"),
        (["another"], 2, "name one topic, and one source"),
    ],
)
def test_what_is_wrong_is_said(
    topic: str, kafka_broker: BrokerAddress, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    arguments = ["tail", topic, *words, "--bootstrap-servers", kafka_broker.bootstrap_servers]
    assert main.main(arguments) == code
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_topic_that_does_not_exist(kafka_broker: BrokerAddress, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["tail", "no-such", "--bootstrap-servers", kafka_broker.bootstrap_servers]) == 1
    assert "topic no-such does not exist" in capsys.readouterr().err


def test_control_characters_are_escapes_and_a_long_scan_reports_progress(
    topic: str,
    kafka_broker: BrokerAddress,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scans, "QUIET_SECONDS", 0.0)
    arguments = ["tail", topic, "--from", "0", "--headers", "--bootstrap-servers", kafka_broker.bootstrap_servers]
    assert main.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.replace("\n", "").isprintable()
    assert "\\x1b[31m\\xff  Added  <script>\\x1b]0;evil\\x07 [bold]  __grt__=Added n=5" in out
    assert f"reading {topic}: " in err


def test_a_source_reads_its_topic_as_its_handlers_would(
    lab: Lab, kes: Callable[..., tuple[int, Any, str]], topic: str
) -> None:
    source = source_of(lab)
    code, record, err = kes(source, "tail", topic, "-p", "0", "-n", "1")
    assert (code, record["value"], record["problem"]) == (0, {"name": "n4", "amount": 1, "deed": ""}, ""), err
    code, record, _ = kes(source, "tail", topic, "-p", "1", "-n", "1")
    assert record["value"] == "<script>\x1b]0;evil\x07 [bold]"
    assert f"{topic}[1]@1: not a Added" in record["problem"]
    assert record["key"] == {"base64": "G1szMW3/"}
    assert f"topic {lab.topic} does not exist" in kes(source, "tail", "--from=0")[2]


def test_follow_shows_what_comes_until_it_is_interrupted(
    lab: Lab, kafka_broker: BrokerAddress, tmp_path: Path, settings: ClientSettings
) -> None:
    lab.admin.create([TopicSpec(name=lab.topic, partitions=1, replication_factor=1)])
    process = Kes(kafka_broker.bootstrap_servers, tmp_path).start("tail", lab.topic, "--follow", "--json")
    assert process.stdout is not None
    with writing(settings, lab.topic) as writer:
        writer.commit((0, "k", "first"))
        assert json.loads(process.stdout.readline())["value"] == "first"
        writer.abort((0, "k", "aborted"))
    with writing(settings, lab.topic) as writer:
        writer.commit((0, "k", "second"))
        assert json.loads(process.stdout.readline())["value"] == "second"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, ""), err
