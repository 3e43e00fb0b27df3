"""The tables and functions of an outbox, as SQL for PostgreSQL 14 and newer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from streams.errors import ConfigError
from streams.outbox.database import VERSION
from streams.records import DEFAULT_MESSAGE_LIMIT, TYPE_HEADER
from streams.topics import MAX_NAME_LENGTH

DEFAULT_TABLE: Final = "kes_outbox"
TOPIC_PATTERN: Final = rf"[A-Za-z0-9._-]{{1,{MAX_NAME_LENGTH}}}"
"""Names that Kafka takes for topics, but for ``.`` and ``..``."""

KEY_BUCKETS: Final = 1024
"""Advisory locks of keys: a transaction never takes more, however many rows it stashes."""
AWAKE_LOCKS: Final = 2048
"""The first advisory lock of those that a sleeping relay holds, one of each shard."""
OWNER_LOCKS: Final = 4096
"""The first advisory lock of those by which the owner of a shard shows itself."""


def checked_table(table: str) -> str:
    """Return the name of an outbox if it needs no quotes in SQL. Raises ``ConfigError``."""
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,39}", table):
        raise ConfigError(f"the table of an outbox is {table!r}; use a to z, 0 to 9 and _, at most 40 of them")
    return table


def stash_function(table: str) -> str:
    """Return the name of the function for SQL: ``kes_stash`` for ``kes_outbox``."""
    return checked_table(table).removesuffix("_outbox") + "_stash"


COLUMNS: Final = {
    "id": "bigint",
    "tag": "integer",
    "shard": "smallint",
    "topic": "text",
    "key": "bytea",
    "value": "bytea",
    "header_names": "text[]",
    "header_values": "bytea[]",
    "partition": "integer",
    "stashed_at": "timestamp with time zone",
    "attempts": "integer",
}
"""Of an outbox, by their types in PostgreSQL."""
PARKED_COLUMNS: Final = {**COLUMNS, "error": "text", "next_try_at": "timestamp with time zone"}


def checked_shards(shards: int) -> None:
    """Raise ``ConfigError`` for a number of shards that cannot be."""
    if type(shards) is not int or not 1 <= shards <= 256:
        raise ConfigError(f"shards is {shards!r}; it must be 1 to 256")


UPGRADES: Final[dict[int, str]] = {}
"""Statements that make the next version of each version; ``{table}`` is the outbox. No other version is known yet."""


def upgrade_sql(version: int, table: str = DEFAULT_TABLE) -> str:
    """Return the statements that make this version of an older one, to be run in one transaction: tables step by step,
    then the functions. Raises ``ConfigError``."""
    steps = "".join(UPGRADES[number] for number in range(version, VERSION))
    return _filled(f"{steps}{functions_sql(table)}\nUPDATE {{table}}_about SET version = {VERSION};\n", table)


def functions_sql(table: str) -> str:
    """Return the statements that make the functions, or replace them. Those of all releases do the same."""
    return _filled(_FUNCTIONS.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"), table)


def parked_index(table: str) -> str:
    """Return the name of the index of parked keys."""
    return f"{checked_table(table)}_parked_keys"


def parked_index_sql(table: str) -> str:
    """Return the statement that makes the index of parked keys, which tables of this version may lack. Keys of any
    length fit into a hash."""
    return f"CREATE INDEX {parked_index(table)} ON {table}_parked USING hash (key);\n"


def schema_sql(table: str = DEFAULT_TABLE, shards: int = 4, max_record_bytes: int = DEFAULT_MESSAGE_LIMIT) -> str:
    """Return the statements that make an outbox, to be run in one transaction. Raises ``ConfigError``.

    ``shards``: how many relays can share the work; it cannot be changed while rows are there. ``max_record_bytes``: of
    key and value, the most that the topics take.
    """
    checked_shards(shards)
    if type(max_record_bytes) is not int or not 1 <= max_record_bytes < 2**31:
        raise ConfigError(f"max_record_bytes is {max_record_bytes!r}; it must be a whole number, 1 or more")
    text = _TABLES + parked_index_sql(table) + _FUNCTIONS
    return _filled(text, table, {"{shards}": str(shards), "{size}": str(max_record_bytes)})


def _filled(text: str, table: str, more: Mapping[str, str] | None = None) -> str:
    replacements = {
        "{table}": checked_table(table),
        "{stash}": stash_function(table),
        "{topic}": TOPIC_PATTERN,
        "{version}": str(VERSION),
        "{type}": TYPE_HEADER,
        "{buckets}": str(KEY_BUCKETS),
        "{awake}": str(AWAKE_LOCKS),
        **(more or {}),
    }
    for name, value in replacements.items():
        text = text.replace(name, value)
    return text


# A transaction takes the lock of a key before it gets an id, and keeps it to its end: so ids of a key are in the order
# of the commits. The lock of a shard is only tried: a relay that sleeps has it, and is to be woken; one that is awake
# cannot fall asleep before this transaction has ended, because it does not get the lock until then.
_TABLES: Final = """\
CREATE TABLE {table} (
  id bigint GENERATED ALWAYS AS IDENTITY,
  tag integer NOT NULL DEFAULT (random() * 4294967295 - 2147483648)::integer,
  shard smallint NOT NULL GENERATED ALWAYS AS (get_byte(sha256(coalesce(key, int8send(id))), 0) % {shards}) STORED,
  topic text NOT NULL CHECK (topic ~ '^{topic}$' AND topic NOT IN ('.', '..')),
  key bytea,
  value bytea,
  header_names text[] NOT NULL DEFAULT '{}',
  header_values bytea[] NOT NULL DEFAULT '{}',
  partition integer CHECK (partition >= 0),
  stashed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  attempts integer NOT NULL DEFAULT 0,
  PRIMARY KEY (shard, id, tag),
  CONSTRAINT {table}_record_size
    CHECK (coalesce(octet_length(key), 0)::bigint + coalesce(octet_length(value), 0) <= {size}),
  CONSTRAINT {table}_headers CHECK (
    cardinality(header_names) = cardinality(header_values) AND array_position(header_names, NULL) IS NULL)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000);

CREATE TABLE {table}_parked (
  LIKE {table},
  error text NOT NULL,
  next_try_at timestamptz NOT NULL,
  PRIMARY KEY (shard, id, tag)
);

CREATE TABLE {table}_shards (shard smallint PRIMARY KEY, serial bigint NOT NULL DEFAULT 0);
INSERT INTO {table}_shards (shard) SELECT generate_series(0, {shards} - 1);

CREATE TABLE {table}_about (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  identity uuid NOT NULL DEFAULT gen_random_uuid(),
  version integer NOT NULL,
  shards integer NOT NULL,
  topic_id text NOT NULL DEFAULT ''
);
INSERT INTO {table}_about (version, shards) VALUES ({version}, {shards});
"""

_FUNCTIONS: Final = """
CREATE FUNCTION {stash}_rows(
  topics text[], keys bytea[], contents bytea[], partitions integer[],
  header_counts integer[], names text[], contents_of_headers bytea[], ordered boolean
) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
  place CONSTANT integer := '{table}'::regclass::oid::integer;
  bucket integer;
  own_shard smallint;
  seen smallint[] := '{}';
  first integer := 1;
  hash bytea;
BEGIN
  IF cardinality(topics) = 1 AND cardinality(names) = header_counts[1] THEN  -- in half the time of what follows
    IF ordered THEN
      hash := sha256(keys[1]);
      PERFORM pg_advisory_xact_lock(place, (get_byte(hash, 1) * 256 + get_byte(hash, 2)) % {buckets});  -- NULL: none
    END IF;
    INSERT INTO {table} (topic, key, value, partition, header_names, header_values)
    VALUES (topics[1], keys[1], contents[1], partitions[1], names, contents_of_headers) RETURNING shard INTO own_shard;
    IF NOT pg_try_advisory_xact_lock_shared(place, {awake} + own_shard) THEN
      PERFORM pg_notify('{table}', own_shard::text);
    END IF;
    RETURN;
  END IF;
  IF ordered THEN
    FOR bucket IN
      SELECT DISTINCT (get_byte(of_key, 1) * 256 + get_byte(of_key, 2)) % {buckets} AS number
      FROM (SELECT sha256(key) AS of_key FROM unnest(keys) AS key WHERE key IS NOT NULL) AS hashed
      ORDER BY number
    LOOP
      PERFORM pg_advisory_xact_lock(place, bucket);
    END LOOP;
  END IF;
  FOR number IN 1 .. cardinality(topics) LOOP
    INSERT INTO {table} (topic, key, value, partition, header_names, header_values)
    VALUES (
      topics[number], keys[number], contents[number], partitions[number],
      names[first : first + header_counts[number] - 1], contents_of_headers[first : first + header_counts[number] - 1])
    RETURNING shard INTO own_shard;
    first := first + header_counts[number];
    IF NOT own_shard = ANY (seen) THEN
      seen := seen || own_shard;
      IF NOT pg_try_advisory_xact_lock_shared(place, {awake} + own_shard) THEN
        PERFORM pg_notify('{table}', own_shard::text);
      END IF;
    END IF;
  END LOOP;
END $body$;

-- The same without arrays, which cost more than all the rest.
CREATE FUNCTION {stash}(topic text, type text, key text, value jsonb) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
  place CONSTANT integer := '{table}'::regclass::oid::integer;
  own_key CONSTANT bytea := convert_to(key, 'UTF8');
  hash CONSTANT bytea := sha256(own_key);
  own_shard smallint;
BEGIN
  PERFORM pg_advisory_xact_lock(place, (get_byte(hash, 1) * 256 + get_byte(hash, 2)) % {buckets});  -- NULL: none
  INSERT INTO {table} (topic, key, value, header_names, header_values)
  VALUES (topic, own_key, convert_to(value::text, 'UTF8'), ARRAY['{type}'], ARRAY[convert_to(type, 'UTF8')])
  RETURNING shard INTO own_shard;
  IF NOT pg_try_advisory_xact_lock_shared(place, {awake} + own_shard) THEN
    PERFORM pg_notify('{table}', own_shard::text);
  END IF;
END $body$;
"""
