"""Settings from the code, the environment and ``kes.toml``, in this order; and ``kes config``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from streams import DEAD_LETTER, EventProducer, EventSourceConfig, GroupConfig, PoolConfig, Retry
from streams.cli.supervisor import Supervisor
from streams.errors import ConfigError
from streams.looks import addresses
from streams.outcomes import ErrorResponse
from streams.settings.sources import bootstrap_servers, joined_client_settings
from tests.unit.cli_kit import Kes, kes_with

SECRET = "hunter2-planted"
FILE = f"""
bootstrap_servers = "file:1"
replication_factor = 3
error_policy = "dead_letter"
decode_policy = {{ then = "continue", attempts = 3 }}

[group]
strategy = ["range", "incremental"]
num_standbys = 1

[pool]
pool_size = 5

[client_settings]
"sasl.username" = "file"
"sasl.password" = "{SECRET}"

[commands.lag]
timeout = 0.2
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
    return tmp_path


@pytest.fixture
def kes(capsys: pytest.CaptureFixture[str]) -> Kes:
    return kes_with(capsys)


def write(text: str) -> None:
    Path("kes.toml").write_text(text)


def made(**settings: Any) -> EventSourceConfig:
    return EventSourceConfig(group_id="g", topic="t", num_partitions=1, **settings)


def test_the_code_wins_over_the_environment_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made().pool == PoolConfig()
    write(FILE)
    config = made()
    assert (config.replication_factor, config.pool.pool_size, config.group.num_standbys) == (3, 5, 1)
    assert config.group.strategies == ("range", "incremental")
    assert config.error_policy == DEAD_LETTER
    assert config.decode_policy == Retry(attempts=3, then=ErrorResponse.CONTINUE)
    assert config.resolved().bootstrap_servers == "file:1"
    for name, value in {
        "KES_REPLICATION_FACTOR": "2",
        "KES_POOL_POOL_SIZE": "6",
        "KES_POOL_BATCH_DELAY_SECONDS": "0.5",
        "KES_GROUP_STATIC_MEMBERSHIP": "false",
        "KES_GROUP_STRATEGY": "range,incremental",
        "KES_ERROR_POLICY": "continue",
        "KES_BOOTSTRAP_SERVERS": "environment:1",
    }.items():
        monkeypatch.setenv(name, value)
    config = made()
    assert (config.replication_factor, config.pool.pool_size, config.pool.batch_delay_seconds) == (2, 6, 0.5)
    assert (config.group.static_membership, config.group.num_standbys) == (False, 1)
    assert config.group.strategies == ("range", "incremental")
    assert config.error_policy.then is ErrorResponse.CONTINUE
    assert config.resolved().bootstrap_servers == "environment:1"
    config = made(replication_factor=1, pool=PoolConfig(pool_size=7), bootstrap_servers="code:1")
    assert (config.replication_factor, config.group.num_standbys) == (1, 1)
    assert config.pool == PoolConfig(pool_size=7), "a group that is given is taken as it is"
    assert config.resolved().bootstrap_servers == "code:1"


def test_settings_of_the_clients_are_joined(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    write(FILE)
    (place / "secret").write_text("from a file\n")
    monkeypatch.setenv("KES_CLIENT_SETTINGS_SASL_PASSWORD_FILE", str(place / "secret"))
    monkeypatch.setenv("KES_CLIENT_SETTINGS_SECURITY_PROTOCOL", "SASL_SSL")
    monkeypatch.setenv("KES_SOURCE_CLIENT_SETTINGS_SASL_USERNAME", "there")
    of_both = {"sasl.password": "from a file", "security.protocol": "SASL_SSL"}
    config = made(client_settings={"sasl.username": "code"}, source_bootstrap_servers="there:1")
    assert config.client_settings == {"sasl.username": "code", **of_both}
    assert config.source_client_settings == {"sasl.username": "there"}
    assert joined_client_settings(None) == {"sasl.username": "file", **of_both}
    assert addresses.client_settings_of(None) == joined_client_settings(None)
    assert EventProducer(client_settings={"sasl.mechanism": "PLAIN"})._settings.overrides == {
        "sasl.username": "file",
        "sasl.mechanism": "PLAIN",
        **of_both,
    }
    write('[client_settings]\n"sasl.password" = { file = "secret" }')
    assert made(client_settings={}).client_settings["sasl.password"] == "from a file"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pool_sise = 3", r"kes\.toml: there is no setting 'pool_sise'"),
        ("replication_facto = 3", r"did you mean 'replication_factor'\?"),
        ("[pool]\npool_sise = 3", r"kes\.toml: \[pool\]: there is no setting 'pool_sise'; did you mean 'pool_size'\?"),
        ("session_timeout_secondz = 3", r"did you mean 'session_timeout_seconds' in \[timeouts\]\?"),
        ("bootstrap_servers = 17", r"kes\.toml: bootstrap_servers: Expected `str`, got `int`"),
        (
            "[client_settings]\n'sasl.password' = ['x']",
            r"kes\.toml: client_settings\.sasl\.password must be text, a nu",
        ),
        ("pool = 3", r"pool must be a table: \[pool\]"),
        ("client_settings = 3", r"client_settings must be a table"),
        ("replication_factor = 'x'", r"kes\.toml: replication_factor: Expected `int`, got `str`"),
        ("[pool]\npool_size = true", r"kes\.toml: pool\.pool_size: Expected `int`, got `bool`"),
        ("[pool]\npool_size = 0", r"PoolConfig\.pool_size is 0.*kes\.toml: pool\.pool_size"),
        ("error_policy = 'never'", r"kes\.toml: error_policy: Invalid enum value 'never'"),
        ("instance_id = 'one'", r"instance_id cannot be there: each process needs one of its own"),
        ("on_partition_activated = 'x'", r"there is no setting 'on_partition_activated'"),
        ("[client_settings]\n'sasl.password' = { file = 'nowhere' }", r"names the file nowhere, which cannot be read"),
        ("= 3", r"kes\.toml is no TOML: Invalid .* line 1"),
        ("a = " + "[" * 5_000, r"kes\.toml is no TOML"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(text: str, said: str) -> None:
    write(text)
    with pytest.raises(ConfigError, match=said):
        made()


def test_a_file_that_is_named_must_be_there_and_variables_have_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KES_POOL_POOL_SIZE", "many")
    with pytest.raises(ConfigError, match="KES_POOL_POOL_SIZE: Expected `int`, got `str`"):
        made()
    monkeypatch.setenv("KES_CONFIG", "elsewhere.toml")
    with pytest.raises(ConfigError, match=r"KES_CONFIG names elsewhere\.toml, which does not exist"):
        made()
    with pytest.raises(ConfigError, match="set bootstrap_servers or the variable KES_BOOTSTRAP_SERVERS"):
        bootstrap_servers("", {})


def test_options_of_commands_come_from_variables_and_the_file(kes: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens at this address; how long that is waited for is said."""
    write(FILE.replace("file:1", "127.0.0.1:1"))
    Path("lagging.py").write_text(
        "from streams import EventSource, EventSourceConfig\n"
        "source = EventSource(EventSourceConfig(group_id='g', topic='t', num_partitions=1))\n"
    )
    monkeypatch.syspath_prepend(".")
    assert "nothing listens at 127.0.0.1:1" in kes("lag", "lagging:source", code=1).words
    monkeypatch.setenv("KES_LAG_TIMEOUT", "many")
    said = kes("lag", "lagging:source", code=2).words
    assert "unable to parse string as a number" in said
    assert "options of this command are also set in KES_LAG_TIMEOUT, [commands.lag] in kes.toml" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("commands = 3", "kes.toml: [commands] must be a table, not int"),
        ("[commands]\nlag = 3", "kes.toml: [commands.lag] must be a table, not int"),
        ("[commands]\ntail = 3", "kes.toml: [commands.tail] must be a table, not int"),
        ("[commands.lags]\ntimeout = 3", "kes.toml: [commands]: there is no setting 'lags'; did you mean 'lag'?"),
        ("[commands.lag]\ntimeouts = 3", "[commands.lag]: there is no setting 'timeouts'; did you mean 'timeout'?"),
    ],
)
def test_options_that_no_command_has_are_named(kes: Kes, text: str, said: str) -> None:
    write(text)
    assert said in kes("lag", "shop:source", code=1).words


@pytest.mark.parametrize("words", ["--help", "--version", "lag --help"])
def test_help_and_version_work_beside_a_file_that_is_broken(kes: Kes, words: str) -> None:
    write("commands = [")
    assert kes(*words.split()).out


@pytest.mark.parametrize("servers", ["garbage", "127.0.0.1", "host:x", "host:99999", "a:1,,b:2", ":9092", "\udcff:1"])
def test_addresses_without_a_port_are_refused(kes: Kes, servers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", servers)
    assert "bootstrap_servers must be host:port, several with commas, not" in kes("tail", "t", code=1).words


@pytest.mark.parametrize("words", ["lag shop:source", "topics plan shop:source", "doctor", "config", "run shop:source"])
def test_every_command_names_variables_that_it_does_not_know(
    kes: Kes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``KES_REPLICATION_FACTR=3 kes topics apply`` made topics with one replica, without a word."""
    monkeypatch.setattr(Supervisor, "run", lambda self: 1)
    monkeypatch.delenv("KES_BOOTSTRAP_SERVERS", raising=False)
    command = words.split()[0].upper()
    meant = {"REPLICATION_FACTR": "REPLICATION_FACTOR", "NUM_STANDBYS": "GROUP_NUM_STANDBYS", "FLAVOUR": ""}
    meant |= {"STATE_FOLDR": "STATE_FOLDER", f"{command}_VERBOSE_": ""}
    others = ("LAG_TIMEOUT", "STATE_SCAN_LIMIT", "WEB_BOOTSTRAP_SERVERS", "STATE_LS_FOLDER", "STATE_SNAPSHOT_JSON")
    for name in (*meant, *others, "POOL_POOL_SIZE", "CLIENT_SETTINGS_X", "SOURCE", "DEBUG"):
        monkeypatch.setenv(f"KES_{name}", "3")
    shown = kes(*words.split(), code=0 if words == "config" else 1)
    found = re.findall(r"KES_\S+ is no setting: it has no effect(?:; did you mean KES_\w+\?)?", shown.words)
    hints = [
        f"KES_{name} is no setting: it has no effect" + (f"; did you mean KES_{near}?" if near else "")
        for name, near in sorted(meant.items())
        if near or name == "FLAVOUR"
    ]
    assert found == sorted(hints)


def test_kes_config_shows_where_each_comes_from(kes: Kes, monkeypatch: pytest.MonkeyPatch) -> None:
    write(FILE)
    Path("market.py").write_text(
        "from streams import EventSource, EventSourceConfig\n"
        "source = EventSource(EventSourceConfig(group_id='g', topic='t', num_partitions=1, replication_factor=1,\n"
        "    client_settings={'ssl.key.password': 'hunter2-planted'}))\n"
    )
    monkeypatch.syspath_prepend(".")
    monkeypatch.setenv("KES_POOL_POOL_SIZE", "6")
    monkeypatch.setenv("KES_POOL_POOL_SISE", "6")
    monkeypatch.setenv("KES_CLIENT_SETTINGS_SASL_PASWORD", SECRET)  # misspelt
    shown = kes("config", "market:source", "--json", "--all")
    assert "KES_POOL_POOL_SISE is no setting: it has no effect; did you mean KES_POOL_POOL_SIZE?" in shown.words
    origins = {line["setting"]: (line["value"], line["origin"]) for line in shown.data}
    assert origins["replication_factor"] == (1, "code")
    assert origins["pool.pool_size"] == (6, "KES_POOL_POOL_SIZE")
    assert origins["group.num_standbys"] == (1, "kes.toml: group.num_standbys")
    assert origins["bootstrap_servers"] == ("file:1", "kes.toml: bootstrap_servers")
    assert origins["client_settings.sasl.password"] == ("***", "kes.toml: client_settings.sasl.password")
    assert origins["client_settings.sasl.username"][0] == "file"
    assert origins["client_settings.ssl.key.password"] == ("***", "code")
    assert origins["pool.max_batch_size"][1] == "default"
    tables = [kes("config"), kes("config", "market:source"), shown]
    monkeypatch.setenv("KES_BOOTSTRAP_SERVERS", f"a:1,me:{SECRET}@b:1")
    monkeypatch.setenv("KES_CLIENT_SETTINGS_HTTPS_PROXY", f"http://me:{SECRET}@proxy:1")
    for words in ([], ["market:source"]):
        tables.append(kes("config", *words, "--json"))
        values = {line["setting"]: line["value"] for line in tables[-1].data}
        assert values["bootstrap_servers"] == "a:1,***@b:1"
        if not words:  # the source was made before
            assert values["client_settings.https.proxy"] == "http://***@proxy:1"
    tables.append(kes("lag", "market:source", code=1))
    assert "bootstrap_servers (KES_BOOTSTRAP_SERVERS) must not hold credentials" in tables[-1].words
    assert SECRET not in "".join(answer.out + answer.err for answer in tables)
    assert SECRET not in repr(made()) + repr(GroupConfig())
    assert "settings file: kes.toml" in tables[0].out
