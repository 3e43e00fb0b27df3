"""Options of a read are checked before anything is asked of Spark or Kafka, and messages name the one at fault."""

from __future__ import annotations

import json

import pytest

from streams.errors import ConfigError
from streams.spark.options import agreed
from streams.spark.read_options import Edge, Topics, read_options

pytestmark = pytest.mark.spark
READ = {"kafka.bootstrap.servers": "b:1", "subscribe": "a, b"}


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)


def test_names_ignore_case_and_have_aliases() -> None:
    options = read_options(
        {"SUBSCRIBE": "a", "Bootstrap.Servers": "b:1", "StartingOffsets": "LATEST", "kafka.debug": "x"}
    )
    assert options.topics == Topics(names=("a",))
    assert options.starting == Edge("startingOffsets", "latest")
    assert options.ending == Edge("endingOffsets", "latest")
    assert options.kafka == {"bootstrap.servers": "b:1", "debug": "x"}
    assert options.committed_only
    assert read_options(READ).topics == Topics(names=("a", "b"))


def test_the_environment_names_the_broker_when_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", "env:9092")
    assert read_options({"subscribe": "a"}).kafka["bootstrap.servers"] == "env:9092"
    assert read_options(READ).kafka["bootstrap.servers"] == "b:1"


def test_secrets_stay_out_of_repr() -> None:
    assert "hunter2" not in repr(read_options({**READ, "kafka.sasl.password": "hunter2"}))


def test_a_batch_begins_at_the_beginning_and_a_stream_at_the_end() -> None:
    assert read_options(READ).starting == Edge("startingOffsets", "earliest")
    assert read_options(READ, stream=True).starting == Edge("startingOffsets", "latest")


def test_words_may_be_written_in_any_case() -> None:
    words = {"isolation": "READ_UNCOMMITTED", "includeHeaders": "False ", "failOnDataLoss": "FALSE"}
    options = read_options({**READ, **words})
    assert (options.committed_only, options.include_headers, options.fail_on_data_loss) == (False, False, False)


def test_three_ways_to_choose_topics() -> None:
    assert read_options({"subscribePattern": "a.*", "bootstrap.servers": "b:1"}).topics == Topics(pattern="a.*")
    assigned = read_options({"assign": '{"a": [1, 0, 1]}', "bootstrap.servers": "b:1"}).topics
    assert assigned == Topics(assigned={"a": (0, 1)})


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
    options = read_options({**READ, "maxTriggerDelay": text}, stream=True)
    assert options.max_trigger_delay_seconds == pytest.approx(seconds)


WRONG = [
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
    ({"startingTimestamp": "9223372036854775808"}, "option startingTimestamp must be .* at most 9223372036854775807"),
    ({"startingTimestamp": "1e30"}, "option startingTimestamp must be .* at most 9223372036854775807"),
    ({"sasl.password": "x"}, "unknown option sasl.password .* did you mean kafka.sasl.password"),
]


def test_whole_numbers_are_taken_as_they_are_written() -> None:
    """As a float, the first is rounded, and the second is more than Spark takes for a limit."""
    assert read_options({**READ, "startingTimestamp": "9007199254740993"}).starting.at == 9007199254740993
    most = {"maxOffsetsPerTrigger": "9223372036854775807"}
    assert read_options({**READ, **most}, stream=True).max_offsets_per_trigger == 2**63 - 1
    assert read_options({**READ, "minPartitions": "1e3"}).min_partitions == 1000


def test_the_same_option_of_a_function_and_of_its_options() -> None:
    assert agreed({"Subscribe": "t", "isolation": "x"}, {"subscribe": "t", "types": None}) == {
        "subscribe": "t",
        "isolation": "x",
    }
    with pytest.raises(ConfigError, match="option subscribe is 'u', but the call says 't': give one of them"):
        agreed({"Subscribe": "u"}, {"subscribe": "t"})


@pytest.mark.parametrize("stream", [False, True], ids=["batch", "stream"])
@pytest.mark.parametrize(("change", "problem"), WRONG)
def test_wrong_options(change: dict[str, str], problem: str, stream: bool) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_options({**READ, **change}, stream=stream)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
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
)
def test_wrong_options_of_a_batch(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_options({**READ, **change})


def test_an_end_may_be_where_the_start_is_or_be_found_out_later() -> None:
    for start, end in ((6, 6), (6, -1), (-1, 6), (-2, 0), (6, -2)):
        edges = {"startingOffsets": start, "endingOffsets": end}
        options = {name: json.dumps({"a": {"0": at}}) for name, at in edges.items()}
        assert read_options({**READ, "subscribe": "a", **options}).ending.at == {"a": {0: end}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"endingOffsets": "latest"}, "option endingOffsets is for batch reads"),
        ({"endingTimestamp": "1"}, "option endingTimestamp is for batch reads"),
        ({"maxOffsetsPerTrigger": "0"}, "option maxOffsetsPerTrigger must be at least 1"),
        ({"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"}, "is larger than maxOffsetsPerTrigger"),
        ({"maxTriggerDelay": "soon"}, "option maxTriggerDelay must be a length of time"),
        ({"maxTriggerDelay": "-5s"}, "option maxTriggerDelay must be a length of time"),
    ],
)
def test_wrong_options_of_a_stream(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_options({**READ, **change}, stream=True)
