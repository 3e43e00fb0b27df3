"""``format("grt")``: Kafka topics as a Spark source and sink, in Python, without a connector jar.

Spark builds these objects in processes of its own (one to plan a read, one to plan a write, one to commit it) and
sends them to the tasks by pickle; they hold parsed options and nothing alive.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import types as t
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)

from streams.errors import ConfigError
from streams.spark.options import flag
from streams.spark.reading.read_options import read_options
from streams.spark.reading.reader import BatchReader
from streams.spark.reading.record_batches import check_schema, read_schema
from streams.spark.reading.stream_source import stream_reader
from streams.spark.writing.sink import BatchWriter, MicroBatchWriter, StreamWriter
from streams.spark.writing.write_options import (
    MICRO_BATCH,
    micro_batch_options,
    stream_write_options,
    write_options,
)


class GrtDataSource(DataSource):
    """The data source as Spark knows it: through ``pyspark_grt``, or ``streams.spark.register``."""

    one_machine = False
    """Whether driver and tasks share a temporary folder."""

    @classmethod
    def name(cls) -> str:
        return "grt"

    def schema(self) -> t.StructType:
        return read_schema(include_headers=flag("includeHeaders", self.options.get("includeHeaders", "true")))

    def reader(self, schema: t.StructType) -> DataSourceReader:
        options = read_options(_plain(self.options))
        check_schema(schema, options)
        return BatchReader(options)

    def writer(self, schema: t.StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise ConfigError("format('grt') cannot overwrite: a topic is only ever appended to; use mode('append')")
        plain = _of_python(self.options)
        if MICRO_BATCH.lower() in plain:
            return MicroBatchWriter(*micro_batch_options(plain), schema, one_machine=self.one_machine)
        return BatchWriter(write_options(plain), schema, one_machine=self.one_machine)

    def streamReader(self, schema: t.StructType) -> DataSourceStreamReader:  # noqa: N802
        return stream_reader(_plain(self.options), schema)

    def streamWriter(self, schema: t.StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        if overwrite:
            raise ConfigError("format('grt') cannot replace what is in a topic: use outputMode('append')")
        return StreamWriter(stream_write_options(_of_python(self.options)), schema, one_machine=self.one_machine)


class LocalGrtDataSource(GrtDataSource):
    """The same in a session on one machine, where large writes may be staged in the temporary folder unasked."""

    one_machine = True


def _of_python(options: Mapping[str, str]) -> dict[str, str]:
    """The options of a write whose tasks encode in Python. Raises ``ConfigError`` where they must not."""
    plain = _plain(options)
    if plain.get("tasks", "").lower() == "java":
        raise ConfigError(
            "option tasks=java: this session does not have kes-spark.jar on its class path. Add the path that `kes "
            "spark jar` shows to the setting spark.jars before the session starts (local_session does it)"
        )
    return plain


def _plain(options: Mapping[str, str]) -> dict[str, str]:
    # Spark's map ignores case by keeping lower-case names; what is read here is lower case too, on purpose.
    return {name.lower(): options[name] for name in options}
