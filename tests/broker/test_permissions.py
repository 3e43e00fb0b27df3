"""Each row of the table of least rights on a broker with ACLs: enough; and with one less an error names it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streams.broker import KafkaBroker
from streams.cli.rights import of_input, of_source
from tests.broker import (  # noqa: F401  add their rows
    permissions_commands,
    permissions_further,
    permissions_outbox,
    permissions_reading,
)
from tests.broker.permissions_kit import FEATURES, SOURCE, USER, Heard, Kes, Office, all_topics, rows
from tests.unit.waiting import PATIENCE, until

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(120)]


BEFORE_3_6 = {"transaction.partition.verification.enable": "false"}
"""So that a transaction can be left hanging."""


@pytest.fixture(scope="module")
def strict() -> Iterator[KafkaBroker]:
    """Users with passwords may do what ACLs allow."""
    with KafkaBroker(sasl="PLAIN", acl=True, users=[USER], properties=BEFORE_3_6) as broker:
        yield broker


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("streams")
    logger.addHandler(handler)
    before, _ = logger.level, logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)


_NUMBERS = itertools.count()
"""Short names make messages that can be read."""


async def test_the_page_has_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "security.md"
    assert "\n".join(rows()) in page.read_text()


async def test_the_doctor_names_what_is_missing(strict: KafkaBroker, kes: Kes) -> None:
    office = Office(strict, "doctor-")
    await all_topics(office, kes)
    needed = [office.right(text) for text in SOURCE]
    config = office.lab.config().resolved()
    assert set(needed) == {*of_input(config.topic), *of_source(config)}  # the table's row
    elsewhere = office.lab.config(source_bootstrap_servers="127.0.0.1:1").resolved()
    row = FEATURES["a source whose topic is on another cluster: where its group is"]
    assert {office.right(text) for text in row.rights} == {*of_source(elsewhere)}
    office.grant([*SOURCE, "Describe cluster", "DescribeConfigs cluster", "Describe topic __transaction_state"])
    _, answer, said = await asyncio.to_thread(kes, office.source(), "doctor", behind=1)
    assert answer, said
    states = [(found["state"], found["text"]) for found in answer["findings"] if found["check"] == "acls"]
    assert [state for state, _ in states] == ["ok"], states
    for missing in SOURCE:
        office.grant([right for right in SOURCE if right != missing])
        _, answer, said = await asyncio.to_thread(kes, office.source(), "doctor", behind=1)
        assert answer, said
        found = [found["remedy"] for found in answer["findings"] if found["check"] == "acls"]
        right = office.right(missing)
        assert right.command in found, (missing, found)


@pytest.mark.parametrize("words", [["group"], pytest.param(["tail"], marks=pytest.mark.nightly)])
@pytest.mark.parametrize("wrong", [{"sasl.password": "wrong"}, {"sasl.mechanism": "SCRAM-SHA-512"}])
async def test_a_login_that_is_refused_is_named_at_once(
    strict: KafkaBroker, kes: Kes, words: list[str], wrong: dict[str, str]
) -> None:
    """By both clients: the one of members, and librdkafka."""
    office = Office(strict, "login-")
    source = office.source(client_settings={**office.settings, **wrong})
    code, _, said = await asyncio.to_thread(kes, source, *words, behind=len(words))
    assert code == 1
    assert "refuses the credentials" in said
    assert "sasl.mechanism" in said
    assert "wrong" not in said


def marked(*case: str, gate: bool) -> Any:
    return pytest.param(*case, id="-".join(filter(None, case)), marks=[] if gate else [pytest.mark.nightly])


FIRST = next(iter(FEATURES))
ENOUGH = [marked(name, gate=name == FIRST) for name in FEATURES]
LESS = [
    marked(name, right, "", gate=name == FIRST and right.split()[0] != "DescribeConfigs" and "LETTERS" not in right)
    for name, feature in FEATURES.items()
    for right in feature.rights
    if name == FIRST or right not in SOURCE or not set(SOURCE) <= set(feature.rights)  # a source's are tried once
]
LESS.append(marked("`kes txn end`", "Read topic __transaction_state", "Describe topic __transaction_state", gate=False))
"""Here the log can be found, and not be read: the decision names the right."""
INCLUDED = {"Read": "Describe", "Write": "Describe", "Alter": "Describe", "Delete": "Describe"}
"""Kafka's rule: who has the one right on a resource has the other, too."""


async def test_no_right_of_a_row_comes_with_another_one() -> None:
    """The table is of the least rights: without such a one nothing fails."""
    for name, feature in FEATURES.items():
        rights = [tuple(right.split(maxsplit=1)) for right in feature.rights]
        given = {(INCLUDED[operation], resource) for operation, resource in rights if operation in INCLUDED}
        assert not given & set(rights), name


@pytest.mark.parametrize("name", ENOUGH)
async def test_these_rights_are_enough(strict: KafkaBroker, name: str, kes: Kes) -> None:
    feature = FEATURES[name]
    office = Office(strict, f"p{next(_NUMBERS)}-", feature.partitions)
    await feature.prepare(office, kes)
    office.grant((*feature.rights, *feature.also))
    await asyncio.wait_for(feature.use(office, kes), 60)


@pytest.mark.parametrize(("name", "missing", "left"), LESS)
async def test_one_right_less_is_named_with_what_to_type(
    strict: KafkaBroker, heard: Heard, name: str, missing: str, left: str, kes: Kes
) -> None:
    """``left``: what the user has in the place of the missing one."""
    feature = FEATURES[name]
    office = Office(strict, f"p{next(_NUMBERS)}-", feature.partitions)
    await feature.prepare(office, kes)
    rights = [right for right in (*feature.rights, *feature.also) if right != missing]
    office.grant([*rights, left] if left else rights)
    right = office.right(missing)
    # Without any right on a topic or a group it is Describe that is missed first.
    operations = (right.operation,) if left else (right.operation, INCLUDED.get(right.operation, right.operation))
    pattern = f"--operation ({'|'.join(operations)}) --{right.kind} ?{re.escape(right.name)}"
    using = asyncio.ensure_future(feature.use(office, kes))
    said = ""

    def is_said() -> bool:
        nonlocal said
        said = heard.text + (repr(using.exception()) if using.done() else "")
        return bool(re.search(pattern, said))

    try:
        await until(lambda: is_said() or using.done(), "the source says what it waits for, or something fails")
        assert is_said(), said
        assert "password" not in said
    finally:
        using.cancel()
        await asyncio.wait([using], timeout=PATIENCE)
