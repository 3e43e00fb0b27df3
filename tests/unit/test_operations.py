"""The dashboard, the alert rules and the operations page keep to the names that are exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from streams.cli.worker_metrics import WorkerMetrics
from streams.observability.catalogue import INSTRUMENTS, WORKER_STARTS, WORKER_UP, Kind
from tests.unit.test_metrics_export import full

ROOT = Path(__file__).resolve().parents[2]
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((ROOT / "deploy/alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
TARGETS: list[tuple[str, dict[str, str]]] = [
    (panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])
]
PAGE = (ROOT / "docs/guides/operations.md").read_text()
METRIC = re.compile(r"\b(?:kes|process)_[a-z_]+\b")
OF_THE_SUPERVISOR = (WORKER_UP.name, f"{WORKER_STARTS.name}_total")


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every sample that a source with everything exports, and the supervisor adds: its labels."""
    found: dict[str, set[str]] = {name: set() for name in OF_THE_SUPERVISOR}
    for family in (*full().registry.collect(), *WorkerMetrics(["w-0"]).registry.collect()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels, {"worker"})
    return found


@pytest.mark.parametrize("rule", ALERTS, ids=[rule["alert"] for rule in ALERTS])
def test_an_alert_names_what_is_exported(rule: dict[str, Any], exported: dict[str, set[str]]) -> None:
    names = METRIC.findall(rule["expr"])
    assert names
    assert [name for name in names if name not in exported] == []
    labels = set().union(*(exported[name] for name in names))
    text = " ".join(rule["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
    assert set(re.findall(r"(\w+)=~?\"", rule["expr"])) <= labels
    if kept := re.search(r"by \(([^)]*)\)", rule["expr"]):  # an aggregation drops the other labels
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= set(kept[1].split(", "))
    assert rule["labels"]["severity"] in ("warning", "critical")


def test_a_panel_shows_what_is_exported(exported: dict[str, set[str]]) -> None:
    wrong = [(title, name) for title, target in TARGETS for name in METRIC.findall(target["expr"])
             if name not in exported]  # fmt: skip
    assert wrong == []
    for title, target in TARGETS:
        labels = set().union(*(exported[name] for name in METRIC.findall(target["expr"])))
        wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert wanted <= labels, title
        if kept := re.search(r"by \(([^)]*)\)", target["expr"]):
            assert wanted <= set(kept[1].split(", ")), title
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_label_values_in_alerts_and_panels_are_exported() -> None:
    """``response="dead_letter"`` and the like: a value that no sample ever has would match nothing, silently."""
    values: dict[str, set[str]] = {}
    for family in full().registry.collect():
        for sample in family.samples:
            for name, value in sample.labels.items():
                values.setdefault(name, set()).add(value)
    used = [
        (label, value)
        for expression in [rule["expr"] for rule in ALERTS] + [target["expr"] for _, target in TARGETS]
        for label, text in re.findall(r'(\w+)=~?"([^"]*)"', expression)
        for value in text.split("|")
        if "$" not in value
    ]
    assert len(used) > 8
    assert [each for each in used if each[1] not in values[each[0]]] == []


def test_the_page_explains_every_metric_and_every_alert_and_no_others() -> None:
    for instrument in INSTRUMENTS:
        name = f"{instrument.name}_total" if instrument.kind is Kind.COUNTER else instrument.name
        labels = f"`{{{', '.join(instrument.labels)}}}`" if instrument.labels else ""
        assert f"| `{name}`{labels and ' ' + labels} |" in PAGE, name
    explained = set(re.findall(r"^\| `(Kes\w+)` \|", PAGE, re.M))
    assert explained == {rule["alert"] for rule in ALERTS}
    known = {instrument.name for instrument in INSTRUMENTS}
    named = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in re.findall(r"\bkes_[a-z_]+\b", PAGE)}
    assert named <= known
