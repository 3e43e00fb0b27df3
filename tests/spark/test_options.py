"""Options are checked before anything is asked of Spark or Kafka, and messages name the one at fault."""

from __future__ import annotations

import pytest

from streams.errors import ConfigError
from streams.spark.read_options import read_options
from streams.spark.write_options import write_options

pytestmark = pytest.mark.spark
READ = {"kafka.bootstrap.servers": "b:1", "subscribe": "a, b"}
WRITE = {"bootstrap.servers": "b:1", "topic": "t", "writeId": "w"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)


def test_names_ignore_case_and_have_aliases() -> None:
    options = read_options(
        {"SUBSCRIBE": "a", "Bootstrap.Servers": "b:1", "StartingOffsets": "LATEST", "kafka.debug": "x"}
    )
    assert (options.topics, options.starting, options.ending) == (("a",), "latest", "latest")
    assert options.kafka == {"bootstrap.servers": "b:1", "debug": "x"}
    assert options.committed_only
    assert read_options(READ).topics == ("a", "b")


def test_the_environment_names_the_broker_when_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "env:9092")
    assert read_options({"subscribe": "a"}).kafka["bootstrap.servers"] == "env:9092"
    assert read_options(READ).kafka["bootstrap.servers"] == "b:1"


def test_secrets_stay_out_of_repr() -> None:
    secret = {"kafka.sasl.password": "hunter2"}
    assert "hunter2" not in repr(read_options({**READ, **secret})) + repr(write_options({**WRITE, **secret}))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"startingOfsets": "latest"}, "unknown option startingofsets .* did you mean startingOffsets"),
        ({"topic": "x"}, "unknown option topic for reading"),
        ({"subscribe": " , "}, "option subscribe is missing"),
        ({"isolation": "none"}, "option isolation must be"),
        ({"startingOffsets": "5"}, "option startingOffsets must be"),
        ({"endingOffsets": '{"a":{"0":1}}'}, "option endingOffsets names the topics"),
        ({"endingOffsets": '{"a":{"0":1},"b":{"0":-3}}'}, r"option endingOffsets: b\[0\] has the impossible offset"),
        ({"stallSeconds": "soon"}, "option stallSeconds must be a number"),
        ({"kafka.isolation.level": "read_committed"}, "use the option isolation"),
        ({"kafka.sasl.jaas.config": "x"}, "belongs to Java clients: use kafka.sasl.username"),
        ({"bootstrap.servers": "other:1"}, "differ"),
        ({"kafka.bootstrap.servers": ""}, "option kafka.bootstrap.servers is missing"),
    ],
)
def test_wrong_options_for_reading(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_options({**READ, **change})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"writeId": ""}, "option writeId is missing: name this write"),
        ({"writeId": "a\nb"}, "printable"),
        ({"topic": ""}, "option topic is missing"),
        ({"checkpointLocation": "x"}, "unknown option checkpointlocation for writing"),
        ({"stagingThreshold": "-1"}, "option stagingThreshold must be at least 0"),
        ({"kafka.transactional.id": "x"}, "it comes from writeId"),
        ({"kafka.acks": "0"}, "always all"),
    ],
)
def test_wrong_options_for_writing(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        write_options({**WRITE, **change})
