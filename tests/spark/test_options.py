"""Options are checked before anything is asked of Spark or Kafka, and messages name the one at fault."""

from __future__ import annotations

import pytest

from streams.errors import ConfigError
from streams.spark.options import addressed, checked, kafka_settings
from streams.spark.write_options import stream_write_options, write_options

pytestmark = pytest.mark.spark
WRITE = {"bootstrap.servers": "b:1", "topic": "t", "writeId": "w"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)


def test_secrets_stay_out_of_repr() -> None:
    assert "hunter2" not in repr(write_options({**WRITE, "kafka.sasl.password": "hunter2"}))


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
        ({"stagingDir": "hdfs://nn/staging"}, "option stagingDir must be a path .*not the address hdfs://nn/staging"),
        ({"stagingDir": "file:/staging"}, "option stagingDir must be a path"),
    ],
)
def test_wrong_options_for_writing(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        write_options({**WRITE, **change})


STREAM = {
    "bootstrap.servers": "b:1",
    "topic": "t",
    "sink": "s",
    "checkpointLocation": "c",
    "queryName": "q",
    "path": "",
}


def test_streaming_takes_sparks_own_options() -> None:
    options = stream_write_options(STREAM)
    assert (options.sink, options.topic, options.marker_topic) == ("s", "t", "t")
    assert (options.replace_query, options.last_written_batch) == (None, None)
    given = {"lastWrittenBatch": "1b4e-28ba:41", "replaceQuery": "1b4e-28bb", "asyncProgressTrackingEnabled": "false"}
    options = stream_write_options({**STREAM, **given})
    assert (options.last_written_batch, options.replace_query) == (("1b4e-28ba", 41), "1b4e-28bb")
    assert "hunter2" not in repr(stream_write_options({**STREAM, "kafka.sasl.password": "hunter2"}))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sink": ""}, "option sink is missing: name this sink"),
        ({"sink": "x" * 201}, "option sink must be at most 200"),
        ({"sink": "w \u00e4"}, "printable ASCII characters"),
        ({"sink": "  "}, "option sink is missing"),
        ({"stagingThreshold": "1.5"}, "option stagingThreshold must be"),
        ({"writeId": "w"}, "unknown option writeid for streaming into"),
        ({"topic": ""}, "markerTopic instead: one of the topics, always the same one for the same sink"),
        ({"lastWrittenBatch": "41"}, "lastWrittenBatch must be a query's id, a colon and the number"),
        ({"lastWrittenBatch": "q:x"}, "lastWrittenBatch must be"),
        ({"lastWrittenBatch": "q:-2"}, "lastWrittenBatch must be"),
        ({"lastWrittenBatch": ":3"}, "lastWrittenBatch must be"),
        ({"asyncProgressTrackingEnabled": "true"}, "asyncProgressTrackingEnabled cannot be true"),
        ({"replaceQery": "x"}, "did you mean replaceQuery"),
    ],
)
def test_wrong_options_for_streaming(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        stream_write_options({**STREAM, **change})


def test_where_the_brokers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that is given is never passed over for the environment's: that is another cluster."""
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "env:1")
    for name in ("kafka.bootstrap.servers", "Bootstrap.Servers"):
        assert kafka_settings(checked(addressed({name: "given:1"}, None), (), "x"))["bootstrap.servers"] == "given:1"
        assert addressed({name: "a:1"}, "a:1")[name] == "a:1"
        with pytest.raises(ConfigError, match="differ: give one of them"):
            addressed({name: "given:1"}, "other:1")
    assert addressed({}, "here:1") == {"kafka.bootstrap.servers": "here:1"}
    assert addressed({}, None) == {"kafka.bootstrap.servers": "env:1"}


def test_one_option_in_two_spellings() -> None:
    with pytest.raises(ConfigError, match="option WRITEID is given twice, with different values"):
        write_options({**WRITE, "WRITEID": "other"})
