"""Dashboards and alert rules ask for metrics that the code defines, with labels that they have."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from parsed_sources import tree_of

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RULES = sorted((ROOT / "deploy/prometheus").glob("alerts*.yml"))
SUFFIXES = {
    "Counter": ("_total", "_created"),
    "Tally": ("_total", "_created"),
    "Gauge": ("",),
    "Histogram": ("_bucket", "_sum", "_count", "_created"),
    "HistogramTally": ("_bucket", "_sum", "_count"),
}
ADDED = {"service", "process", "job", "instance", "le"}
"""By the gateway, by Prometheus, and by every histogram."""
_METRIC = re.compile(r"\bpilotlight_[a-z0-9_]+\b")
_SELECTOR = re.compile(r"(pilotlight_[a-z0-9_]+)\{([^}]*)\}")
_LABEL = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)")
_BY = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def defined() -> dict[str, set[str]]:
    """Every sample name that a service can show, with its labels: read from the calls that define
    metrics.
    """
    found: dict[str, set[str]] = {}
    sources = [
        path for folder in ("libs", "services") for path in (ROOT / folder).glob("*/src/**/*.py")
    ]
    for path in sources:
        for node in ast.walk(tree_of(path.read_text())):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in SUFFIXES
                and node.args
            ):
                continue
            name = node.args[0]
            if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
                continue
            given = (
                node.args[2]
                if len(node.args) > 2
                else next((k.value for k in node.keywords if k.arg == "labelnames"), None)
            )
            labels: set[str] = set(ast.literal_eval(given)) if given is not None else set()
            stem = (
                name.value.removesuffix("_total")
                if node.func.id in ("Counter", "Tally")
                else name.value
            )
            found.update({stem + suffix: labels for suffix in SUFFIXES[node.func.id]})
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Where a query stands, and the query."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.name}: {panel['title']}", target["expr"]
    for path in RULES:
        rules: dict[str, Any] = yaml.safe_load(path.read_text())
        for group in rules["groups"]:
            for rule in group["rules"]:
                yield f"{path.name}: {rule.get('alert') or rule.get('record')}", rule["expr"]


METRICS = defined()
RECORDED = {where.partition(": ")[2] for where, _ in queries() if re.search(r": [a-z_]+:", where)}
CASES = list(queries())


@pytest.mark.parametrize(("where", "query"), CASES, ids=[where for where, _ in CASES])
def test_query_asks_for_what_there_is(where: str, query: str) -> None:
    names = {name for name in _METRIC.findall(query) if name not in RECORDED}
    assert names or "up{" in query or any(name in query for name in RECORDED) or "up ==" in query, (
        f"{where} asks for nothing of ours"
    )
    assert not names - METRICS.keys()
    for name, inner in _SELECTOR.findall(query):
        assert set(_LABEL.findall(inner)) <= METRICS[name] | ADDED
    for inner in _BY.findall(query):
        known = set[str]().union(*(METRICS[name] for name in names))
        assert {label.strip() for label in inner.split(",") if label.strip()} <= known | ADDED


def test_there_is_something_to_look_at() -> None:
    assert {path.stem for path in DASHBOARDS} == {
        "cache",
        "cold-starts",
        "errors",
        "fleet",
        "requests",
    }
    assert len(METRICS) > 50


def test_dashboards_are_told_apart() -> None:
    boards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({board["uid"] for board in boards}) == len(boards)
    for board in boards:
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_provisioning_finds_them() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    sources = yaml.safe_load((folder / "datasources/pilotlight.yml").read_text())["datasources"]
    known = {source["uid"] for source in sources}
    used = {
        panel["datasource"]["uid"]
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
    }
    assert used <= known
    (provider,) = yaml.safe_load((folder / "dashboards/pilotlight.yml").read_text())["providers"]
    compose = (ROOT / "docker-compose.yml").read_text()
    assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in compose


def test_prometheus_reads_the_rules() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["/etc/prometheus/alerts*.yml"]
    (job,) = [job for job in config["scrape_configs"] if job["job_name"] == "pilotlight"]
    assert job["static_configs"] == [{"targets": ["gateway:8000"]}]
    assert job["honor_labels"]
