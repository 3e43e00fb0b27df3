"""Options of a write: ``df.write`` and ``df.writeStream`` of ``format("grt")``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from streams.errors import ConfigError
from streams.spark.options import checked, kafka_settings, number

_WRITE: Final = ("topic", "writeId", "stagingDir", "stagingThreshold", "markerTopic", "runId")


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """What to write. ``topic=None``: every row names its own. ``kafka`` may hold secrets and stays out of ``repr``."""

    kafka: dict[str, str] = field(repr=False)
    topic: str | None
    marker_topic: str
    write_id: str
    run_id: str | None
    staging_dir: str | None
    staging_threshold: int


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Raises ``ConfigError`` that names the option at fault."""
    plain = checked(options, _WRITE, "writing")
    write_id = plain.get("writeid", "")
    if not write_id:
        raise ConfigError(
            "option writeId is missing: name this write (for example 'flights-2013-01'). A second run with the "
            "same name "
            "writes nothing, which is what makes a repeated or half-failed run exactly once; without a name it would "
            "write everything again"
        )
    if len(write_id) > 200 or not write_id.isprintable():
        raise ConfigError("option writeId must be at most 200 printable characters")
    topic = plain.get("topic") or None
    marker_topic = plain.get("markertopic") or topic
    if marker_topic is None:
        raise ConfigError(
            "option topic is missing. When each row names its topic in a column, give the option markerTopic "
            "instead: one of the topics, always the same one for the same writeId"
        )
    return WriteOptions(
        kafka=kafka_settings(plain),
        topic=topic,
        marker_topic=marker_topic,
        write_id=write_id,
        run_id=plain.get("runid"),
        staging_dir=plain.get("stagingdir"),
        staging_threshold=int(number("stagingThreshold", plain.get("stagingthreshold", str(1 << 20)), minimum=0)),
    )
