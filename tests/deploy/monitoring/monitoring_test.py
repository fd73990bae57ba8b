"""Alerts and dashboard: what they ask for is what the servers export, and Prometheus takes it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "deploy/helm/heavywater/files"
ALERTS = yaml.safe_load((FILES / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((FILES / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
CASES = yaml.safe_load((Path(__file__).parent / "alerts.yaml").read_text())["tests"]
OPERATIONS = (ROOT / "docs/operations.md").read_text()
SOURCES = [
    "cache_service/server/cache_metrics.cc",
    "cache_service/server/cluster_metrics.cc",
    "cache_service/runtime/rpc_metrics.cc",
    "worker/server/worker_metrics.cc",
]
# Of a scrape, not of the servers.
SCRAPE_LABELS = {"job", "namespace", "pod", "instance", "le"}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120)


def source_text() -> str:
    return "\n".join((ROOT / path).read_text() for path in SOURCES)


def exported() -> dict[str, str]:
    """Metric -> type, as the sources say."""
    text = source_text()
    found = re.findall(r'"(heavywater_\w+)"', text)
    histograms = set(re.findall(r'(?:BuildHistogram\(\)\s*\.Name\(|MetricType::Histogram, )"(heavywater_\w+)"', text))
    return {name: "histogram" if name in histograms else "plain" for name in found}


def expressions() -> list[str]:
    """Of the alerts and the dashboard, its variables replaced."""
    of_panels = [target["expr"] for panel in PANELS for target in panel["targets"]]
    plain = [e.replace("$__rate_interval", "5m").replace("$namespace", ".*").replace("$pod", ".*") for e in of_panels]
    return [rule["expr"] for rule in RULES] + plain


def test_every_metric_that_is_asked_for_is_exported_and_every_other_is_on_the_dashboard() -> None:
    metrics = exported()
    series = set()
    for name, kind in metrics.items():
        series |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    asked = {name for expression in expressions() for name in re.findall(r"\bheavywater_\w+", expression)}
    assert asked - series == set()
    shown = {re.sub("_(bucket|sum|count)$", "", n) if n not in metrics else n for n in asked}
    assert set(metrics) - shown == set()


def test_every_label_that_is_asked_for_is_exported() -> None:
    labels = set(re.findall(r'\{"(\w+)",', source_text()))
    assert {"tier", "state", "reason", "method", "code", "phase", "kind"} <= labels
    asked = set()
    for expression in expressions():
        asked |= set(re.findall(r'(\w+)\s*[=!]~?\s*"', expression))
        for listed in re.findall(r"\b(?:by|on|ignoring|without) \(([^)]*)\)", expression):
            asked |= {label.strip() for label in listed.split(",")}
    assert asked - labels - SCRAPE_LABELS == set()


def test_promtool_takes_the_rules() -> None:
    checked = promtool("check", "rules", str(FILES / "alerts.yaml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(RULES)} rules found" in checked.stdout


def test_promtool_takes_what_the_dashboard_asks(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(expressions())]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", "--lint=none", str(path))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should_and_not_else() -> None:
    tested = promtool("test", "rules", str(Path(__file__).parent / "alerts.yaml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    checks: list[dict[str, Any]] = [check for case in CASES for check in case["alert_rule_test"]]
    names = {rule["alert"] for rule in RULES}
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == names
    assert {check["alertname"] for check in checks if not check.get("exp_alerts")} == names


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_how_bad_it_is_and_where_to_read_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
    assert f"### {rule['alert']}\n" in OPERATIONS


def test_the_dashboard_lays_its_panels_side_by_side() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_says_what_it_shows_and_uses_the_chosen_data_source() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    for panel in PANELS:
        assert panel["description"] and panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables
