"""The settings of a relay from a file and the environment: strict, and without secrets in messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from streams.errors import ConfigError
from streams.outbox.relay_file import relay_config

Write = Callable[[str], str]

ENVIRONMENT = {"KES_OUTBOX_DATABASE": "postgresql://me@x/y", "KES_BOOTSTRAP_SERVERS": "x:1"}


@pytest.fixture(autouse=True)
def _nothing_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("KES_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> str:
        path = tmp_path / "relay.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_what_is_given_wins_then_the_environment_then_the_file(write: Write) -> None:
    path = write("""
        name: shop
        table: shop_outbox
        batch_rows: 500
        backoff_seconds: 2
        bootstrap_servers: file:1
        client_settings:
          sasl.username: file
          sasl.mechanism: PLAIN
        """)
    environment = {**ENVIRONMENT, "KES_OUTBOX_BATCH_ROWS": "700", "KES_CLIENT_SETTINGS_SASL_USERNAME": "outside"}
    config = relay_config(path, environment, table="given_outbox", name="")
    assert (config.name, config.table, config.batch_rows) == ("shop", "given_outbox", 700)
    assert (config.backoff_seconds, config.bootstrap_servers) == (2.0, "x:1")
    assert config.client_settings == {"sasl.username": "outside", "sasl.mechanism": "PLAIN"}
    assert relay_config("", {**ENVIRONMENT, "KES_OUTBOX_NAME": "outside"}).name == "outside"


def test_secrets_come_from_other_files(write: Write, tmp_path: Path) -> None:
    (tmp_path / "address").write_text("postgresql://me:secret@x/y\n")
    (tmp_path / "password").write_text("secret\n")
    path = write(
        f"{{name: shop, database: {{file: {tmp_path}/address}}, client_settings: "
        f"{{sasl.password: {{file: {tmp_path}/password}}}}}}"
    )
    config = relay_config(path, {"KES_BOOTSTRAP_SERVERS": "x:1"})
    assert config.database == "postgresql://me:secret@x/y"
    assert config.client_settings == {"sasl.password": "secret"}
    assert "secret" not in repr(config)
    named = {"KES_OUTBOX_DATABASE_FILE": f"{tmp_path}/address", "KES_BOOTSTRAP_SERVERS": "x:1"}
    assert relay_config(write("name: shop"), named).database == "postgresql://me:secret@x/y"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nmae: shop", r"relay.yaml: there is no setting 'nmae'; did you mean 'name'\?"),
        ("name: shop\nname: other", "line 1, column 1: 'name' is there twice"),
        ("name: shop\nbatch_rows: many", r"relay.yaml: batch_rows: Expected `int`, got `str`"),
        ("name: shop\nbatch_rows: '5'", "batch_rows: Expected `int`"),
        ("name: shop\nbatch_rows: true", "batch_rows: Expected `int`, got `bool`"),
        ("name: shop\nbatch_rows: 0", "batch_rows is 0"),
        ("name: 5", "name: Expected `str`, got `int`"),
        ("name: !!python/object/apply:os.system ['true']", "line 1, column 7: could not determine a constructor"),
        ("name: [", "is no YAML for settings: line 1, column 8: expected the node content"),
        ("- name", "must have settings by name"),
        ("shop", "must have settings by name"),
        ("{[a]: b}", "is no YAML for settings: line 1|there is no setting"),
        ("", "an outbox has a name in Kafka"),
        ("name: shop\ndatabase: postgresql://me:secret@x/y", "a password has no place in this file"),
        ("name: shop\ndatabase: host=x password=secret", "a password has no place in this file"),
        ("name: shop\ndatabase: {file: /nowhere/secret}", "database names the file /nowhere/secret, which cannot"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_setting(write: Write, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as raised:
        relay_config(write(text), ENVIRONMENT if "database" not in text else {"KES_BOOTSTRAP_SERVERS": "x:1"})
    assert "secret@" not in str(raised.value)
    assert "password=" not in str(raised.value)


def test_a_variable_that_is_wrong_is_named(write: Write) -> None:
    with pytest.raises(ConfigError, match="KES_OUTBOX_BATCH_ROWS: Expected `int`"):
        relay_config(write("name: shop"), {**ENVIRONMENT, "KES_OUTBOX_BATCH_ROWS": "many"})
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        relay_config("nowhere.yaml", ENVIRONMENT)
