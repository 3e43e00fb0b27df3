"""``kes view watch`` on a real broker: what is committed, until Ctrl-C."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.testing.fixtures import BrokerAddress
from tests.broker.client_kit import PATIENCE, create, writing
from tests.broker.gate import nightly
from tests.broker.kes_kit import Kes

pytestmark = [pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.mark.parametrize("deleted", [False, nightly(True)])
def test_watch_shows_changes_until_it_is_interrupted_or_the_topic_is_gone(
    admin: TopicAdmin,
    kafka_broker: BrokerAddress,
    tmp_path: Path,
    settings: ClientSettings,
    topic_prefix: str,
    deleted: bool,
) -> None:
    create(admin, name := topic_prefix + "prices", 2, cleanup_policy="compact")
    with writing(settings, name) as writer:
        writer.commit((0, "a", "1"))
        process = Kes(kafka_broker.bootstrap_servers, tmp_path).start("view", "watch", name, "--initial", "--json")
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline())]
        writer.abort((0, "a", "2"))
        writer.commit((0, "a", "3"), (1, "b", "4"))
        seen += [json.loads(process.stdout.readline()) for _ in range(2)]
    assert [(row["key"], row["old"], row["new"]) for row in seen[:1]] == [("a", None, 1)]
    assert {(row["key"], row["old"], row["new"]) for row in seen[1:]} == {("a", 1, 3), ("b", None, 4)}
    if deleted:
        admin.delete([name], PATIENCE)
    else:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    assert process.returncode == (1 if deleted else 0), err
    assert deleted == ("does not exist any more" in err)
