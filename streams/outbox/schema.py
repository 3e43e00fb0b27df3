"""The tables and functions of an outbox, as SQL for PostgreSQL 14 and newer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from streams.errors import ConfigError
from streams.model.topics import MAX_NAME_LENGTH
from streams.records import DEFAULT_MESSAGE_LIMIT, TYPE_HEADER

VERSION: Final = 1
"""Version of the tables of an outbox. A relay refuses any other."""
DEFAULT_TABLE: Final = "kes_outbox"
TOPIC_PATTERN: Final = rf"[A-Za-z0-9._-]{{1,{MAX_NAME_LENGTH}}}"
"""Names that Kafka takes for topics, but for ``.`` and ``..``."""

KEY_BUCKETS: Final = 1024
"""Advisory locks that are shared by keys."""
MAX_KEY_LOCKS: Final = 1000
"""Keys that a transaction locks by themselves; those behind them are locked with their whole buckets, because the
locks of a server are limited (``max_locks_per_transaction``)."""
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


FOUND_FUNCTION: Final = """
SELECT quote_ident(nspname),
       coalesce((SELECT prosrc FROM pg_proc WHERE oid = to_regproc(quote_ident(nspname) || '.' || %s)), 'missing')
FROM pg_class JOIN pg_namespace AS spaces ON spaces.oid = relnamespace WHERE pg_class.oid = %s::text::regclass
"""
# What was seen may be the commit of a writer with synchronous_commit = off, which a crash of the server undoes. A
# commit of this session flushes all that was written to the log before it, if it has written something itself.
FLUSH: Final = """
SELECT CASE WHEN pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()
  THEN pg_logical_emit_message(true, 'kes_outbox', '') END
"""


def checked_shards(shards: int) -> None:
    """Raise ``ConfigError`` for a number of shards that cannot be."""
    if type(shards) is not int or not 1 <= shards <= 256:
        raise ConfigError(f"shards is {shards!r}; it must be 1 to 256")


SCHEMA: Final = "@schema@"
"""In the text of the functions, of their table's schema: they work under any ``search_path``."""

UPGRADES: Final[dict[int, str]] = {}
"""Statements that make the next version of each version; ``{table}`` is the outbox. No other version is known yet."""


def upgrade_sql(version: int, table: str = DEFAULT_TABLE) -> str:
    """Return the statements that make this version of an older one, to be run in one transaction: tables step by step,
    then the functions. Raises ``ConfigError``."""
    steps = "".join(UPGRADES[number] for number in range(version, VERSION))
    return _filled(f"{steps}{functions_sql(table)}\nUPDATE {{table}}_about SET version = {VERSION};\n", table)


def functions_sql(table: str) -> str:
    """Return the statement that makes the functions in the schema of the table, or replaces them. Those of all releases
    may be at work together. In their text ``SCHEMA`` stands for the schema."""
    return _filled(_FUNCTIONS, table)


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
        "{most}": str(MAX_KEY_LOCKS),
        "{schema}": SCHEMA,
        "{awake}": str(AWAKE_LOCKS),
        **(more or {}),
    }
    for name, value in replacements.items():
        text = text.replace(name, value)
    return text


# A transaction takes the lock of a key before it gets an id, and keeps it to its end: so ids of a key are in the order
# of the commits. That lock is a hash of 64 bits, of key and table. With it the key's bucket is locked, shared: only a
# transaction with very many keys, which takes buckets only, and the functions of earlier releases, which know no other
# locks, wait for that: a key's rows keep their order while functions are replaced under load, or put back.
# The lock of a shard is only tried: a relay that sleeps has it, and is to be woken; one that is awake cannot fall
# asleep before this transaction has ended, because it does not get the lock until then.
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
DO $apply$ BEGIN EXECUTE replace($functions$
CREATE OR REPLACE FUNCTION {schema}.{stash}_rows(
  topics text[], keys bytea[], contents bytea[], partitions integer[],
  header_counts integer[], names text[], contents_of_headers bytea[], ordered boolean
) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
  place CONSTANT integer := $name${schema}.{table}$name$::regclass::oid::integer;
  locked integer := coalesce(nullif(current_setting('{table}.keys', true), ''), '0')::integer;  -- of the transaction
  own_shard smallint;
  seen smallint[] := '{}';
  first integer := 1;
  bucket integer;
BEGIN
  IF cardinality(topics) = 1 AND cardinality(names) = header_counts[1] THEN  -- in half the time of what follows
    IF ordered AND keys[1] IS NOT NULL THEN
      bucket := (get_byte(sha256(keys[1]), 1) * 256 + get_byte(sha256(keys[1]), 2)) % {buckets};
      IF locked < {most} THEN
        PERFORM pg_advisory_xact_lock_shared(place, bucket);
        PERFORM pg_advisory_xact_lock(hashtextextended(encode(keys[1], 'hex'), place)),
                set_config('{table}.keys', (locked + 1)::text, true);
      ELSE
        PERFORM pg_advisory_xact_lock(place, bucket);
      END IF;
    END IF;
    INSERT INTO {schema}.{table} (topic, key, value, partition, header_names, header_values)
    VALUES (topics[1], keys[1], contents[1], partitions[1], names, contents_of_headers) RETURNING shard INTO own_shard;
    IF NOT pg_try_advisory_xact_lock_shared(place, {awake} + own_shard)
       AND coalesce(current_setting('{table}.wake', true), '') <> 'off' THEN
      PERFORM pg_notify('{table}', own_shard::text);
    END IF;
    RETURN;
  END IF;
  IF ordered THEN
    locked := locked + (SELECT count(DISTINCT key) FROM unnest(keys) AS key);
    FOR bucket IN
      SELECT DISTINCT (get_byte(of_key, 1) * 256 + get_byte(of_key, 2)) % {buckets} AS number
      FROM (SELECT sha256(key) AS of_key FROM unnest(keys) AS key WHERE key IS NOT NULL) AS hashed
      ORDER BY number
    LOOP
      IF locked <= {most} THEN
        PERFORM pg_advisory_xact_lock_shared(place, bucket);
      ELSE
        PERFORM pg_advisory_xact_lock(place, bucket);
      END IF;
    END LOOP;
    IF locked <= {most} THEN
      PERFORM set_config('{table}.keys', locked::text, true);
      PERFORM pg_advisory_xact_lock(number) FROM (
        SELECT DISTINCT hashtextextended(encode(key, 'hex'), place) AS number
        FROM unnest(keys) AS key WHERE key IS NOT NULL ORDER BY number) AS hashed;
    END IF;
  END IF;
  FOR number IN 1 .. cardinality(topics) LOOP
    INSERT INTO {schema}.{table} (topic, key, value, partition, header_names, header_values)
    VALUES (
      topics[number], keys[number], contents[number], partitions[number],
      names[first : first + header_counts[number] - 1], contents_of_headers[first : first + header_counts[number] - 1])
    RETURNING shard INTO own_shard;
    first := first + header_counts[number];
    IF NOT own_shard = ANY (seen) THEN
      seen := seen || own_shard;
      IF NOT pg_try_advisory_xact_lock_shared(place, {awake} + own_shard)
         AND coalesce(current_setting('{table}.wake', true), '') <> 'off' THEN
        PERFORM pg_notify('{table}', own_shard::text);
      END IF;
    END IF;
  END LOOP;
END $body$;

-- The same without arrays, which cost more than all the rest.
CREATE OR REPLACE FUNCTION {schema}.{stash}(topic text, type text, key text, value jsonb)
RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
  place CONSTANT integer := $name${schema}.{table}$name$::regclass::oid::integer;
  locked CONSTANT integer := coalesce(nullif(current_setting('{table}.keys', true), ''), '0')::integer;
  own_key CONSTANT bytea := convert_to(key, 'UTF8');
  hash CONSTANT bytea := sha256(own_key);
  bucket CONSTANT integer := (get_byte(hash, 1) * 256 + get_byte(hash, 2)) % {buckets};  -- NULL: no lock
  own_shard smallint;
BEGIN
  IF locked < {most} THEN
    PERFORM pg_advisory_xact_lock_shared(place, bucket);
    PERFORM pg_advisory_xact_lock(hashtextextended(encode(own_key, 'hex'), place)),
            set_config('{table}.keys', (locked + 1)::text, true);
  ELSE
    PERFORM pg_advisory_xact_lock(place, bucket);
  END IF;
  INSERT INTO {schema}.{table} (topic, key, value, header_names, header_values)
  VALUES (topic, own_key, convert_to(value::text, 'UTF8'), ARRAY['{type}'], ARRAY[convert_to(type, 'UTF8')])
  RETURNING shard INTO own_shard;
  IF NOT pg_try_advisory_xact_lock_shared(place, {awake} + own_shard)
     AND coalesce(current_setting('{table}.wake', true), '') <> 'off' THEN
    PERFORM pg_notify('{table}', own_shard::text);
  END IF;
END $body$;
$functions$, '{schema}', (
  SELECT quote_ident(nspname) FROM pg_class JOIN pg_namespace AS spaces ON spaces.oid = relnamespace
  WHERE pg_class.oid = '{table}'::regclass));
END $apply$;
"""
