"""Options are checked before anything is asked of Spark or Kafka, and messages name the one at fault."""

from __future__ import annotations

import pytest

from streams.errors import ConfigError
from streams.spark.write_options import write_options

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
    ],
)
def test_wrong_options_for_writing(change: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        write_options({**WRITE, **change})
