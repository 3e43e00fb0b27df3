"""The rows of the table of least rights for commands about a source."""

from __future__ import annotations

from tests.broker.permissions_kit import (
    POSITION,
    all_topics,
    command,
    commands,
    hangs,
    has_more,
    is_ahead,
    is_restored,
    nothing,
)

command("lag", rights=["Describe topic SOURCE", "Describe group GROUP"], behind=1)
command("group", rights=["Describe group GROUP"], behind=1)
commands(
    "`kes state ls`, `get`, `scan`, `export`, `diff`, `verify --what changelog`; `kes parked list`, `show`; "
    "`kes jobs list`, `show`",
    "state ls",
    "parked list",
    "jobs list",
    "state get a",
    "state scan",
    "state export FILE",
    "state diff changelog changelog",
    "state verify --what changelog --decode",
    rights=["Read topic CHANGELOG"],
)
commands("`kes dlq list`, `show`", "dlq list", "dlq show 0@0", rights=["Read topic DEAD_LETTERS"])
command(
    "dlq",
    "drop",
    "--all",
    "--yes",
    rights=["Read topic DEAD_LETTERS", "Write topic DEAD_LETTERS", "Write transactional-id DEAD_LETTERS.kes-dlq"],
)
command(
    "dlq",
    "replay",
    "--all",
    "--yes",
    rights=[
        "Read topic DEAD_LETTERS",
        "Write topic DEAD_LETTERS",
        "Write topic SOURCE",
        "Write transactional-id DEAD_LETTERS.kes-dlq",
    ],
)

command("tail", "-n", "1", rights=["Read topic SOURCE"], behind=1)
SEEN = [
    f"{deed} topic {name}"
    for name in ("SOURCE", "CHANGELOG", "DEAD_LETTERS")
    for deed in ("Describe", "DescribeConfigs")
]
command("topics", "plan", rights=SEEN)
command("topics", "apply", rights=[*SEEN, "Create topic CHANGELOG", "Create topic DEAD_LETTERS"], prepare=nothing)
command(
    "skip",
    "0@2",
    "--yes",
    rights=[*POSITION, "Write topic CHANGELOG", "Write transactional-id CHANGELOG.kes-skip"],
    prepare=has_more,
    behind=1,
)
command(
    "reset",
    "--to",
    "earliest",
    "--state",
    "keep",
    "--no-backup",
    "--yes",
    rights=[*POSITION, "Write topic CHANGELOG", "Write transactional-id CHANGELOG.kes-reset"],
    prepare=has_more,
    behind=1,
    name="`kes reset`",
)
command(
    "offsets",
    "start",
    "--at",
    "earliest",
    "--yes",
    rights=[
        "Read topic SOURCE",
        "Read group GROUP",
        "Write topic CHANGELOG",
        "Write transactional-id CHANGELOG.kes-start",
    ],
    prepare=all_topics,
    name="`kes offsets start`, its changelog made before, and empty",
)
command("offsets", "accept", "--yes", rights=POSITION, prepare=is_ahead)
command(
    "offsets",
    "accept",
    "--restored",
    "--yes",
    rights=[*POSITION, "Write topic CHANGELOG"],
    prepare=is_restored,
    name="`kes offsets accept --restored`",
)
commands(
    "`kes txn list`, `hanging`",
    "txn list --topic CHANGELOG",
    "txn hanging --topic CHANGELOG",
    rights=["Read topic CHANGELOG", "Describe topic __transaction_state"],
    also=["Describe transactional-id *"],
    prepare=hangs,
)
command(
    "txn",
    "end",
    "--topic",
    "CHANGELOG",
    "--partition",
    "0",
    "--start-offset",
    "OFFSET",
    "--min-age",
    "0",
    "--yes",
    rights=["Read topic CHANGELOG", "Read topic __transaction_state", "ClusterAction cluster"],
    also=["Describe transactional-id *"],
    prepare=hangs,
)
