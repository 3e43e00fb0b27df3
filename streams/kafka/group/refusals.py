"""Refusals of a group, as errors that say what to do, whichever client met them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streams.errors import ConfigError, MembershipFatal, StreamsError


def refused(code: str, group_id: str, instance: str) -> StreamsError | None:
    """Translate a refusal that any member may get, by its name in the protocol. ``None``: another error."""
    group = f"group {group_id}"
    match code:
        case "FENCED_INSTANCE_ID":
            return MembershipFatal(f"{group}: another process joined as instance {instance!r}; this one has to stop")
        case "INVALID_SESSION_TIMEOUT":
            return ConfigError(
                f"{group}: the broker refuses the session timeout; it must be within the broker's "
                "group.min.session.timeout.ms (6000 unless set) and group.max.session.timeout.ms"
            )
        case "GROUP_MAX_SIZE_REACHED":
            return MembershipFatal(f"{group}: it is full (the broker's group.max.size)")
        case "INVALID_GROUP_ID":
            return ConfigError(f"{group}: the broker refuses this group id")
        case _:
            return None


def explained(code: str, group_id: str, instance: str, translated: StreamsError) -> StreamsError:
    """Make the error for a refusal that ends a membership. ``translated``: what the client makes of it."""
    # A missing right, a login or a version has the client's words; anything else has no better ones than its name.
    common = refused(code, group_id, instance)
    if common is None and not isinstance(translated, ConfigError):
        common = MembershipFatal(f"group {group_id}: {code}")
    return common or translated


def no_common_strategy(group_id: str, strategies: Iterable[str]) -> MembershipFatal:
    """Make the error for a group whose members know no strategy of this one, and do not go away."""
    return MembershipFatal(
        f"group {group_id}: no strategy of this member ({', '.join(strategies)}) is known to all members of the "
        "running group. To change the strategy of a running group, give all members both strategies, the new one "
        "first, and restart them one by one; then restart them one by one without the old one. A group with members of "
        "something else than this toolkit cannot be joined: use another group id"
    )


def other_protocol(group_id: str) -> MembershipFatal:
    """Make the error for a group whose members use another protocol, which the broker does not convert."""
    return MembershipFatal(
        f"group {group_id}: its members use another protocol than the broker's (KIP-848), and the broker does not "
        "convert the group (group.consumer.migration.policy); stop all of them first, or use a group id of its own"
    )


def strangers(group_id: str, names: Sequence[str]) -> MembershipFatal:
    """Make the error for members of another program in a group that the broker shares out. ``names``: theirs."""
    return MembershipFatal(
        f"group {group_id}: other programs are members of it ({', '.join(names)}). "
        "What the broker gives to them no member of this toolkit handles: stop them, or use another group id"
    )


def name_taken(group_id: str, instance: str) -> MembershipFatal:
    """Make the error for another member with this instance name that does not go away."""
    return MembershipFatal(
        f"group {group_id}: another member is named {instance!r}; each process needs an instance name of its own"
    )


def not_understood(group_id: str, error: ValueError) -> MembershipFatal:
    """Make the error for assignments that are not this toolkit's, or are for other settings."""
    return MembershipFatal(
        f"group {group_id}: its leader's assignments are not understood ({error}); all members must run this toolkit "
        "with the same topic and number of partitions. A group that the broker shares out (KIP-848) has to be empty "
        "first, or use another group id"
    )
