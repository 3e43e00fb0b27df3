"""Check that settings and changelog agree about a partition that is muted."""

from __future__ import annotations

from streams.errors import ConfigError
from streams.records import TopicPartition
from streams.runtime.changelog import OffsetRecord, VoiceRecord


def refuse_voice(shadow_of: str, where: TopicPartition, record: OffsetRecord | None, voice: VoiceRecord | None) -> None:
    """Raise ``ConfigError`` unless settings and changelog agree whether a partition is muted. Only the changelog
    decides; the setting is there so that no deployment comes too early, or is forgotten."""
    is_marked = record is not None and record.is_muted
    group = "" if voice is None else voice.group
    if is_marked is (voice is not None) and group == shadow_of:
        return
    if shadow_of and not is_marked and voice is None:
        raise ConfigError(
            f"{where}: shadow_of is {shadow_of!r}, and the changelog does not say that the partition is muted: it "
            "would speak. Run `kes rebuild start MODULE:SOURCE --of OLD` before the first start; or leave shadow_of out"
        )
    if is_marked is not (voice is not None):
        raise ConfigError(
            f"{where}: the changelog says by one record that the partition is muted, and by another one that it is "
            "not: something else writes to it"
        )
    raise ConfigError(
        f"{where}: the changelog says that the partition is muted and follows {group}; shadow_of is "
        f"{shadow_of!r}. It never speaks by accident: set shadow_of={group!r}"
    )
