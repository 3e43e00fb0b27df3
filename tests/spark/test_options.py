"""Options are checked before anything is asked of Spark or Kafka, and messages name the one at fault."""

from __future__ import annotations

import json
import pickle
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from streams.errors import ConfigError, TopicError
from streams.spark import kafka
from streams.spark.kafka import settings_of
from streams.spark.options import TokenCallback, addressed, agreed, checked, kafka_settings
from streams.spark.reading.read_options import Edge, ReadOptions, TopicChoice, read_options
from streams.spark.writing.sink import target_of
from streams.spark.writing.write_options import stream_write_options, write_options
from tests.spark.tokens import signing_in

pytestmark = pytest.mark.spark
READ = {"kafka.bootstrap.servers": "b:1", "subscribe": "a, b"}
WRITE = {"bootstrap.servers": "b:1", "topic": "t", "writeId": "w"}
SINK = {"bootstrap.servers": "b:1", "topic": "t", "sink": "s", "checkpointLocation": "c", "queryName": "q", "path": ""}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)


def batch(change: dict[str, str]) -> ReadOptions:
    return read_options({**READ, **change})


def stream(change: dict[str, str]) -> ReadOptions:
    return read_options({**READ, **change}, stream=True)


def write(change: dict[str, str]) -> Any:
    return write_options({**WRITE, **change})


def sink(change: dict[str, str]) -> Any:
    return stream_write_options({**SINK, **change})


ALICE = "tests.spark.tokens:alice"
TOKEN = {"kafka.security.protocol": "sasl_plaintext", "kafka.sasl.mechanism": "OAUTHBEARER"}

Make = Callable[[dict[str, str]], object]
WRONG: dict[tuple[Make, ...], list[tuple[dict[str, str], str]]] = {
    (batch, stream): [
        ({"startingOfsets": "latest"}, "unknown option startingofsets .* did you mean startingOffsets"),
        ({"topic": "x"}, "unknown option topic for reading"),
        ({"subscribe": " , "}, "option subscribe is missing"),
        ({"subscribe": ""}, "option subscribe is missing"),
        ({"subscribePattern": "x"}, "subscribe and subscribePattern cannot go together"),
        ({"subscribe": "", "subscribePattern": "("}, "option subscribePattern is no regular expression"),
        ({"subscribe": "", "assign": "a"}, "option assign must be JSON"),
        ({"subscribe": "", "assign": "{}"}, "option assign must be JSON"),
        ({"subscribe": "", "assign": '{"a": []}'}, "option assign must be JSON"),
        ({"subscribe": "", "assign": '{"a": [-1]}'}, "option assign must be JSON"),
        ({"subscribe": "", "assign": '{"a": [true]}'}, "option assign must be JSON"),
        (
            {"subscribe": "", "assign": '{"a": [0, 1]}', "startingOffsets": '{"a":{"0":1}}'},
            r"names the partitions \[0\] of a, but assign names \[0, 1\]",
        ),
        ({"isolation": "none"}, "option isolation must be"),
        ({"startingOffsets": "5"}, "option startingOffsets must be earliest, latest or JSON"),
        ({"startingOffsets": '{"a":{"0":1.5},"b":{"0":1}}'}, "option startingOffsets must be"),
        ({"startingOffsets": '{"a":{"0":true},"b":{"0":1}}'}, "option startingOffsets must be"),
        ({"startingTimestamp": "yesterday"}, "option startingTimestamp must be a number"),
        ({"startingTimestamp": "12.7"}, "option startingTimestamp must be a whole number"),
        ({"startingTimestamp": "inf"}, "option startingTimestamp must be at least 0, not inf"),
        ({"minPartitions": "1e400"}, "option minPartitions must be at least 1, not 1e400"),
        ({"stallSeconds": "inf"}, "option stallSeconds must be at least 1"),
        ({"startingTimestamp": "-1"}, "option startingTimestamp must be at least 0"),
        ({"startingOffsetsByTimestamp": '{"a":{"0":-1},"b":{"0":1}}'}, r"a\[0\] has the impossible time -1"),
        ({"startingOffsetsByTimestampStrategy": "guess"}, "must be error or latest"),
        ({"stallSeconds": "soon"}, "option stallSeconds must be a number"),
        ({"stallSeconds": "nan"}, "option stallSeconds must be at least 1"),
        ({"failOnDataLoss": "perhaps"}, "option failOnDataLoss must be true or false"),
        ({"includeHeaders": "1"}, "option includeHeaders must be true or false"),
        ({"minPartitions": "0"}, "option minPartitions must be at least 1"),
        ({"minPartitions": "1.5"}, "option minPartitions must be a whole number"),
        ({"maxRecordsPerPartition": "many"}, "option maxRecordsPerPartition must be a number"),
        ({"groupIdPrefix": "x"}, "option groupIdPrefix .*commitOffsetsTo"),
        ({"kafkaConsumer.pollTimeoutMs": "1"}, "use stallSeconds"),
        ({"kafka.isolation.level": "read_committed"}, "use the option isolation"),
        ({"kafka.sasl.jaas.config": "x"}, "belongs to Java clients: use kafka.sasl.username"),
        ({"bootstrap.servers": "other:1"}, "differ"),
        ({"kafka.bootstrap.servers": ""}, "option kafka.bootstrap.servers is missing"),
        ({"types": " , "}, "option types is empty"),
        (
            {"startingTimestamp": "9223372036854775808"},
            "startingTimestamp must be .* at most 9223372036854775807",
        ),
        ({"startingTimestamp": "1e30"}, "startingTimestamp must be .* at most 9223372036854775807"),
        ({"sasl.password": "x"}, "unknown option sasl.password .* did you mean kafka.sasl.password"),
    ],
    (batch, stream, write, sink): [
        ({"idPrefix": "a/b"}, "option idPrefix must be at most 50 letters"),
        ({"idPrefix": "kes.spark."}, r"and without kes\.spark, which follows it"),
        ({"tokenCallback": ALICE}, r"option tokenCallback is for kafka\.sasl\.mechanism=OAUTHBEARER"),
        ({**TOKEN, "tokenCallback": "nowhere.at_all:alice"}, "tokenCallback must be module:function.*nowhere"),
        ({**TOKEN, "tokenCallback": "tests.spark.tokens"}, "tokenCallback must be module:function"),
        ({**TOKEN, "tokenCallback": "tests.spark.tokens:bob"}, "tokenCallback must be module:function.*bob"),
        ({**TOKEN, "tokenCallback": "tests.spark.tokens:not_a_function"}, "is str, which is no function"),
        *(
            ({f"kafka.{name}": "1"}, rf"kafka\.{re.escape(name)} cannot be set: it has no effect here; leave it out")
            for name in ("error_cb", "retries", "session.timeout.ms", "message.timeout.ms")
        ),
        ({"kafka.oauth_cb": ALICE}, r"kafka\.oauth_cb cannot be set: name the function in the option tokenCallback"),
    ],
    (batch,): [
        ({"endingOffsets": "earliest"}, "option endingOffsets must be latest or JSON"),
        ({"endingOffsets": '{"a":{"0":1}}'}, r"option endingOffsets names the topics \['a'\], but subscribe"),
        ({"endingOffsets": '{"a":{"0":1},"b":{"0":-3}}'}, r"option endingOffsets: b\[0\] has the impossible offset"),
        (
            {"startingOffsets": '{"a":{"0":7},"b":{"0":-2}}', "endingOffsets": '{"a":{"0":6},"b":{"0":3}}'},
            r"option endingOffsets: a\[0\] ends at 6, before it begins \(startingOffsets: 7\)",
        ),
        (
            {
                "startingOffsetsByTimestamp": '{"a":{"0":7},"b":{"0":7}}',
                "endingOffsetsByTimestamp": '{"a":{"0":9},"b":{"0":6}}',
            },
            r"option endingOffsetsByTimestamp: b\[0\] ends at 6, before it begins",
        ),
        ({"startingTimestamp": "7", "endingTimestamp": "6"}, r"endingTimestamp \(6\) is before startingTimestamp"),
        ({"maxOffsetsPerTrigger": "5"}, "option maxOffsetsPerTrigger is for streams"),
        ({"commitOffsetsTo": "g"}, "option commitOffsetsTo is for streams"),
    ],
    (stream,): [
        ({"endingOffsets": "latest"}, "option endingOffsets is for batch reads"),
        ({"endingTimestamp": "1"}, "option endingTimestamp is for batch reads"),
        ({"maxOffsetsPerTrigger": "0"}, "option maxOffsetsPerTrigger must be at least 1"),
        ({"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"}, "is larger than maxOffsetsPerTrigger"),
        ({"maxTriggerDelay": "soon"}, "option maxTriggerDelay must be a length of time"),
        ({"maxTriggerDelay": "-5s"}, "option maxTriggerDelay must be a length of time"),
    ],
    (write,): [
        ({"WRITEID": "other"}, "option WRITEID is given twice, with different values"),
        ({"writeId": ""}, "option writeId is missing: name this write"),
        ({"writeId": "a\nb"}, "printable"),
        ({"topic": ""}, "option topic is missing"),
        ({"checkpointLocation": "x"}, "unknown option checkpointlocation for writing"),
        ({"stagingThreshold": "-1"}, "option stagingThreshold must be at least 0"),
        ({"kafka.transactional.id": "x"}, "it comes from writeId"),
        ({"kafka.acks": "0"}, "always all"),
        (
            {"stagingDir": "dbfs:/staging?x=secret"},
            "stagingDir must be a path .*with file:, s3:.*not dbfs:/staging$",
        ),
        ({"kafka.linger.ms": "5"}, r"option kafka\.linger\.ms does nothing when writing: tasks make the batches"),
        ({"kafka.batch.size": "0"}, r"option kafka\.batch\.size must be at least 1"),
        ({"kafka.transaction.timeout.ms": "3000000000"}, r"timeout\.ms must be at least 1 and at most 2147483647"),
        ({"runId": "../.."}, r"option runId must be 1 to 64 letters, digits, '_' or '-', not '\.\./\.\.'"),
        ({"kafka.message.max.bytes": "1 MB"}, r"option kafka\.message\.max\.bytes must be a number"),
        ({"kafka.compression.type": "brotli"}, r"compression\.type must be none, gzip, snappy, lz4 or zstd"),
        ({"kafka.ssl.keystore.location": "x"}, r"cannot be used for writing: .*ssl\.keystore\.location"),
        ({"kafka.security.protocol": "sasl_ssl", "kafka.sasl.mechanism": "OAUTHBEARER"}, "for writing: .*OAUTHBEARER"),
    ],
    (sink,): [
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
}


def test_a_table_has_options_for_all_that_is_done_with_it() -> None:
    """Each counts where it is known, and a statement's own win."""
    given = {"Subscribe": "a", "topic": "t", "endingOffsets": "latest", "maxOffsetsPerTrigger": "5", "sink": "s"}
    given |= {"bootstrap.servers": "b:1", "kafka.client.id": "c", "failOnDataLoss": "false"}
    table = {f"option.{name}": value for name, value in given.items()}
    assert read_options(table).topics == TopicChoice(names=("a",))
    assert read_options({**table, "subscribe": "b"}).topics == TopicChoice(names=("b",))
    assert read_options(table, stream=True).max_offsets_per_trigger == 5
    written, streamed = write_options({**table, "writeId": "w"}), stream_write_options(table)
    assert (written.topic, written.write_id, streamed.topic, streamed.sink) == ("t", "w", "t", "s")
    assert {each.kafka["client.id"] for each in (read_options(table), written, streamed)} == {"c"}
    makes: list[Make] = [read_options, lambda table: write_options({**table, "writeId": "w"}), stream_write_options]
    for make in makes:
        with pytest.raises(ConfigError, match="unknown option stagingdri"):
            make({**table, "option.stagingDri": "x"})
    with pytest.raises(ConfigError, match="option writeId is among the OPTIONS of the table"):
        write_options({**table, "option.writeId": "w"})


@pytest.mark.parametrize(
    ("make", "change", "problem"),
    [(make, *row) for makers, rows in WRONG.items() for make in makers for row in rows],
)
def test_wrong_options(make: Make, change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make(change)


@pytest.mark.parametrize("make", [batch, stream, write, sink])
def test_secrets_stay_out_of_repr(make: Make) -> None:
    assert "hunter2" not in repr(make({"kafka.sasl.password": "hunter2"}))


def test_names_ignore_case_and_have_aliases() -> None:
    options = read_options(
        {"SUBSCRIBE": "a", "Bootstrap.Servers": "b:1", "StartingOffsets": "LATEST", "kafka.debug": "x"}
    )
    assert options.topics == TopicChoice(names=("a",))
    assert options.starting == Edge("startingOffsets", "latest")
    assert options.ending == Edge("endingOffsets", "latest")
    assert options.kafka == {"bootstrap.servers": "b:1", "debug": "x"}
    assert options.committed_only
    assert batch({}).topics == TopicChoice(names=("a", "b"))


def test_a_batch_begins_at_the_beginning_and_a_stream_at_the_end() -> None:
    assert batch({}).starting == Edge("startingOffsets", "earliest")
    assert stream({}).starting == Edge("startingOffsets", "latest")


def test_words_may_be_written_in_any_case() -> None:
    words = {"isolation": "READ_UNCOMMITTED", "includeHeaders": "False ", "failOnDataLoss": "FALSE"}
    options = batch(words)
    assert (options.committed_only, options.include_headers, options.fail_on_data_loss) == (False, False, False)


def test_three_ways_to_choose_topics() -> None:
    assert read_options({"subscribePattern": "a.*", "bootstrap.servers": "b:1"}).topics == TopicChoice(pattern="a.*")
    assigned = read_options({"assign": '{"a": [1, 0, 1]}', "bootstrap.servers": "b:1"}).topics
    assert assigned == TopicChoice(assigned={"a": (0, 1)})


def test_a_time_wins_over_times_by_partition_and_those_over_offsets() -> None:
    times = '{"a":{"0":5},"b":{"0":6}}'
    assert read_options(
        {**READ, "startingTimestamp": "7", "startingOffsetsByTimestamp": times, "startingOffsets": "latest"}
    ).starting == Edge("startingTimestamp", 7, is_time=True)
    assert read_options({**READ, "endingOffsetsByTimestamp": times, "endingOffsets": "latest"}).ending == Edge(
        "endingOffsetsByTimestamp", {"a": {0: 5}, "b": {0: 6}}, is_time=True
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("15m", 900), ("30s", 30), ("1500", 1.5), ("500ms", 0.5), ("2min", 120), ("1h", 3600)]
)
def test_the_forms_of_a_length_of_time(text: str, seconds: float) -> None:
    options = stream({"maxTriggerDelay": text})
    assert options.max_trigger_delay_seconds == pytest.approx(seconds)


def test_whole_numbers_are_taken_as_they_are_written() -> None:
    """As a float, the first is rounded, and the second is more than Spark takes for a limit."""
    assert batch({"startingTimestamp": "9007199254740993"}).starting.at == 9007199254740993
    most = {"maxOffsetsPerTrigger": "9223372036854775807"}
    assert stream(most).max_offsets_per_trigger == 2**63 - 1
    assert batch({"minPartitions": "1e3"}).min_partitions == 1000


def test_the_same_option_of_a_function_and_of_its_options() -> None:
    assert agreed({"Subscribe": "t", "isolation": "x"}, {"subscribe": "t", "types": None}) == {
        "subscribe": "t",
        "isolation": "x",
    }
    with pytest.raises(ConfigError, match="option subscribe is 'u', but the call says 't': give one of them"):
        agreed({"Subscribe": "u"}, {"subscribe": "t"})


def test_an_end_may_be_where_the_start_is_or_be_found_out_later() -> None:
    for start, end in ((6, 6), (6, -1), (-1, 6), (-2, 0), (6, -2)):
        edges = {"startingOffsets": start, "endingOffsets": end}
        options = {name: json.dumps({"a": {"0": at}}) for name, at in edges.items()}
        assert batch({"subscribe": "a", **options}).ending.at == {"a": {0: end}}


def test_streaming_takes_sparks_own_options() -> None:
    options = sink({})
    assert (options.sink, options.topic, options.marker_topic) == ("s", "t", "t")
    assert (options.replace_query, options.last_written_batch) == (None, None)
    given = {"lastWrittenBatch": "1b4e-28ba:41", "replaceQuery": "1b4e-28bb", "asyncProgressTrackingEnabled": "false"}
    options = sink(given)
    assert (options.last_written_batch, options.replace_query) == (("1b4e-28ba", 41), "1b4e-28bb")


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
    assert read_options({"subscribe": "a"}).kafka["bootstrap.servers"] == "env:1"
    assert batch({}).kafka["bootstrap.servers"] == "b:1"


def test_the_prefix_of_groups_and_transactional_ids() -> None:
    assert (batch({}).group, stream({"idPrefix": "team-a."}).group) == ("kes-spark", "team-a.kes-spark")
    targets = [target_of(make(change)) for change in ({}, {"IDPREFIX": "team-a."}) for make in (write, sink)]
    names = ["kes.spark.write.t/w", "kes.spark.stream/t/s", "team-a.kes.spark.write.t/w", "team-a.kes.spark.stream/t/s"]
    assert [target.identity for target in targets] == names


@pytest.mark.parametrize("make", [batch, stream, write, sink])
def test_a_callback_for_tokens_goes_with_the_settings(make: Any) -> None:
    """By its name: they are the key of what a worker keeps, and are sent to tasks."""
    kafka = pickle.loads(pickle.dumps(make({**TOKEN, "tokenCallback": ALICE}).kafka))
    callback = kafka["oauth_cb"]
    assert hash(callback) == hash(TokenCallback(ALICE))
    token, expires = callback("")
    assert token.count(".") == 2
    assert expires > time.time()
    assert signing_in(kafka).count(".") == 2


def test_a_worker_that_cannot_import_the_callback() -> None:
    kafka = {"bootstrap.servers": "b:1", **TOKEN, "oauth_cb": TokenCallback("nowhere.at_all:alice")}
    with pytest.raises(ConfigError, match=r"Spark's driver and its workers can import, not 'nowhere\.at_all:alice'"):
        settings_of(kafka)


def test_a_topic_that_was_just_made_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"bootstrap.servers": "b:1"}
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(kafka, "time", clock)
    answers = iter([None, None, 3])
    assert kafka.existing("t", settings, lambda: next(answers)) == 3
    with pytest.raises(TopicError, match="topic 't' does not exist at b:1"):
        kafka.existing("t", settings, lambda: None)
    assert 5.0 < now[0] < 6.0
