"""Alert rules: each says what to read, and fires when it should and only then, as Prometheus's own
program evaluates them.

That program is promtool (Debian: `apt-get install prometheus`); without it the rules are only
looked at.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pilotlight.common.errors import CapacityError, InternalError, TransientError, all_errors

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy/prometheus/alerts.yml"
RULES: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(FILE.read_text())["groups"]
    for rule in group["rules"]
}
STEPS = 240
"""Of 15 s: an hour in which all is well, and another one."""
BROKEN_AT_S = 15 * STEPS
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed: apt-get install prometheus",
)

HEALTHY = {
    'up{job="pilotlight",instance="gateway:8000"}': "1",
    'pilotlight_scheduler_leader{service="scheduler",process="1"}': "1",
    'pilotlight_scheduler_leader{service="scheduler",process="2"}': "0",
    'pilotlight_scheduler_epoch{service="scheduler",process="1"}': "7",
    'pilotlight_scheduler_epoch{service="scheduler",process="2"}': "0",
    'pilotlight_cache_grants{service="cache",process="1"}': "0",
    'pilotlight_node_workers{service="loader",process="1"}': "2",
    'pilotlight_worker_starts_total{service="loader",process="1"}': "2",
    'pilotlight_worker_engine_deaths_total{service="worker",process="1"}': "1",
    'pilotlight_worker_device_health{state="healthy",service="worker",process="1"}': "1",
    'pilotlight_worker_device_health{state="failed",service="worker",process="1"}': "0",
    'pilotlight_stale_commands_total{service="loader",process="1"}': "3",
    'pilotlight_worker_stale_commands_total{service="worker",process="1"}': "3",
    'pilotlight_fetches_total{code="",service="loader",process="1"}': "0+1",
    'pilotlight_fetches_total{code="corrupt_chunk",service="loader",process="1"}': "0",
    'pilotlight_fetches_total{code="source_denied",service="loader",process="1"}': "0",
    'pilotlight_cold_starts_total{status="done",service="scheduler",process="1"}': "0+1",
    'pilotlight_cold_starts_total{status="abandoned",service="scheduler",process="1"}': "0",
    'pilotlight_requests_total{model="m",status="ok",service="gateway",process="1"}': "0+10",
    'pilotlight_requests_total{model="m",status="cancelled",service="gateway",process="1"}': "0+2",
    'pilotlight_requests_total{model="m",status="worker_lost",service="gateway",process="1"}': "0",
    'pilotlight_requests_total{model="m",status="too_many_held",service="gateway",process="1"}': "0",
    'pilotlight_requests_total{model="rare",status="ok",service="gateway",process="1"}': "5",
    'pilotlight_requests_total{model="rare",status="worker_lost",service="gateway",process="1"}': "0",
    'pilotlight_requests_total{model="rare",status="no_capacity",service="gateway",process="1"}': "0",
    'pilotlight_http_answers_total{route="none",method="POST",status="429",code="bodies_full",service="gateway",process="1"}': "0",
    'pilotlight_first_tokens_total{model="m",met="true",service="gateway",process="1"}': "0+10",
    'pilotlight_first_tokens_total{model="m",met="false",service="gateway",process="1"}': "0",
    'pilotlight_held_requests{service="gateway",process="1"}': "0",
    'pilotlight_database_errors_total{kind="connection",service="cache",process="1"}': "0",
    'pilotlight_outbox_lag_seconds{service="cache",process="1"}': "0",
    'pilotlight_pruned_rows_total{table="gateway.usage",reason="age",service="gateway",process="1"}': "0+100",
    'pilotlight_pruned_rows_total{table="gateway.outbox",reason="count",service="gateway",process="1"}': "0",
    'pilotlight_prune_failures_total{service="gateway",process="1"}': "0",
    'pilotlight_spans_dropped_total{destination="otlp",service="gateway",process="1"}': "0",
    'pilotlight_admin_refusals_total{code="invalid_api_key",service="gateway",process="1"}': "0",
}
"""What a system shows that is well: a value, or a value and what comes on top with each step."""

GONE = "stale"
Broken = dict[str, str]
"""The start of a series' name and labels → what it shows from then on."""
CASES: list[tuple[str, Broken, int, set[str]]] = [
    ("all is well", {}, 3000, set()),
    ("gateway down", {"pilotlight_": GONE, "up": "0"}, 90, {"PilotlightGatewayDown"}),
    ("gateway down for moments", {"pilotlight_": GONE, "up": "0"}, 45, set()),
    (
        "requests fail",
        {'pilotlight_requests_total{model="m",status="worker_lost"': "0+1"},
        450,
        {"PilotlightRequestsFail"},
    ),
    (
        "one request failed",
        {'pilotlight_requests_total{model="m",status="worker_lost"': "1"},
        150,
        set(),
    ),
    (
        "one request of a rare model failed",
        {'pilotlight_requests_total{model="rare",status="worker_lost"': "1"},
        150,
        set(),
    ),
    (
        "one request of a rare model was refused",
        {'pilotlight_requests_total{model="rare",status="no_capacity"': "1"},
        600,
        set(),
    ),
    (
        "no room",
        {'pilotlight_requests_total{model="m",status="too_many_held"': "0+4"},
        600,
        {"PilotlightRequestsRefused"},
    ),
    (
        "bodies fill their memory",
        {"pilotlight_http_answers": "0+1"},
        600,
        {"PilotlightBodiesRefused"},
    ),
    (
        "requests wait",
        {
            "pilotlight_held_requests": "3",
            "pilotlight_first_tokens_total": "2400",
            'pilotlight_requests_total{model="m",status="ok"': "2400",
        },
        420,
        {"PilotlightRequestsWait"},
    ),
    ("requests wait and others are answered", {"pilotlight_held_requests": "3"}, 600, set()),
    (
        "slow",
        {'pilotlight_first_tokens_total{model="m",met="false"': "0+2"},
        2400,
        {"PilotlightSloMissed"},
    ),
    ("no leader", {"pilotlight_scheduler": "0"}, 60, {"PilotlightNoLeader"}),
    ("no scheduler", {"pilotlight_scheduler": GONE}, 60, {"PilotlightNoLeader"}),
    ("nobody leads for moments", {"pilotlight_scheduler": "0"}, 15, set()),
    (
        "a failover",
        {
            'pilotlight_scheduler_leader{service="scheduler",process="1"': GONE,
            'pilotlight_scheduler_leader{service="scheduler",process="2"': "1",
            'pilotlight_scheduler_epoch{service="scheduler",process="1"': GONE,
            'pilotlight_scheduler_epoch{service="scheduler",process="2"': "8",
        },
        600,
        set(),
    ),
    (
        "one failover after the other",
        {'pilotlight_scheduler_epoch{service="scheduler",process="1"': "8+1"},
        90,
        {"PilotlightLeaderChanges"},
    ),
    ("no cache", {"pilotlight_cache_grants": GONE}, 120, {"PilotlightNoCache"}),
    ("database fails", {"pilotlight_database_errors": "1+1"}, 300, {"PilotlightDatabaseFails"}),
    ("database failed once", {"pilotlight_database_errors": "1"}, 300, set()),
    ("NATS takes no events", {"pilotlight_outbox_lag": "0+15"}, 180, {"PilotlightEventsWait"}),
    (
        "events are lost",
        {'pilotlight_pruned_rows_total{table="gateway.outbox"': "40"},
        60,
        {"PilotlightEventsLost"},
    ),
    ("two leaders", {"pilotlight_worker_stale_commands": "3+1"}, 300, {"PilotlightStaleCommands"}),
    ("workers away", {"pilotlight_node_workers": "0"}, 120, {"PilotlightNoWorkers"}),
    ("loader away", {"pilotlight_node_workers": GONE}, 120, {"PilotlightNoWorkers"}),
    ("workers end", {"pilotlight_worker_starts": "2+1"}, 180, {"PilotlightWorkersRestart"}),
    ("engines die", {"pilotlight_worker_engine_deaths": "1+1"}, 120, {"PilotlightEnginesDie"}),
    (
        "a device fails",
        {'pilotlight_worker_device_health{state="failed"': "1"},
        60,
        {"PilotlightDeviceFailed"},
    ),
    ("one engine died", {"pilotlight_worker_engine_deaths": "2"}, 120, set()),
    (
        "credentials expired",
        {'pilotlight_fetches_total{code="source_denied"': "1+1"},
        120,
        {"PilotlightFetchesFail"},
    ),
    (
        "a damaged file",
        {'pilotlight_fetches_total{code="corrupt_chunk"': "1"},
        60,
        {"PilotlightModelDamaged"},
    ),
    (
        "clients leave",
        {'pilotlight_cold_starts_total{status="abandoned"': "0+3"},
        900,
        {"PilotlightColdStartsAbandoned"},
    ),
    ("rows stay", {"pilotlight_prune_failures": "0+1"}, 300, {"PilotlightRowsNotPruned"}),
    ("spans lost", {"pilotlight_spans_dropped": "0+5"}, 1200, {"PilotlightSpansDropped"}),
    ("keys are tried", {"pilotlight_admin_refusals": "0+5"}, 300, {"PilotlightKeysTried"}),
]


def values(healthy: str, broken: str | None) -> str:
    """An hour of one thing and an hour of the other, in promtool's words; what was counted in the
    first one stays counted.
    """
    start, _, step = healthy.partition("+")
    first = f"{start}+{step or 0}x{STEPS}"
    if broken == GONE:
        return f"{first} stale"
    reached = int(start) + int(step or 0) * (STEPS + 1)
    if broken is None:
        return f"{first} {reached}+{step or 0}x{STEPS}"
    start, _, step = broken.partition("+")
    return f"{first} {start}+{step or 0}x{STEPS}"


def case_for_promtool(
    name: str, broken: Broken, after_s: int, expected: set[str]
) -> dict[str, Any]:
    series: list[dict[str, str]] = []
    for shown, healthy in HEALTHY.items():
        found = max((start for start in broken if shown.startswith(start)), key=len, default=None)
        series.append(
            {
                "series": shown,
                "values": values(healthy, broken[found] if found is not None else None),
            }
        )
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(expected)]
    tests: list[dict[str, Any]] = [
        {"expr": firing, "eval_time": f"{BROKEN_AT_S}s", "exp_samples": []},
        {"expr": firing, "eval_time": f"{BROKEN_AT_S + after_s}s", "exp_samples": samples},
    ]
    return {"name": name, "interval": "15s", "input_series": series, "promql_expr_test": tests}


@pytest.mark.slow
@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    file = tmp_path / "cases.yml"
    cases = [case_for_promtool(*case) for case in CASES]
    file.write_text(
        yaml.safe_dump({"rule_files": [str(FILE)], "evaluation_interval": "15s", "tests": cases})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", file],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    config = (
        (ROOT / "deploy/prometheus/prometheus.yml")
        .read_text()
        .replace("/etc/prometheus/", f"{FILE.parent}/")
    )
    file = tmp_path / "prometheus.yml"
    file.write_text(config)
    done = subprocess.run(
        ["promtool", "check", "config", file],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_each_alert_has_its_case() -> None:
    told = set[str]().union(*(case[3] for case in CASES))
    assert told == RULES.keys()


@pytest.mark.parametrize("name", RULES)
def test_alert_says_what_to_do(name: str) -> None:
    rule = RULES[name]
    assert name.startswith("Pilotlight")
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert len(rule["annotations"]["summary"]) > 20
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor in anchors((ROOT / page).read_text())
    section = (
        (ROOT / "docs/operations/bad-day.md")
        .read_text()
        .split("\n## An alert fires\n", 1)[1]
        .split("\n## ", 1)[0]
    )
    assert f"`{name}`" in section, "the runbook's table of alerts has all of them"


def anchors(text: str) -> set[str]:
    """What a page's headings are linked by."""
    headings = re.findall(r"^#{2,}\s+(.*)$", text, flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_failures_and_refusals_are_those_of_the_taxonomy() -> None:
    """A new error code is counted by one of the two alerts, unless no request can end with it."""
    served = [
        kind for kind in all_errors() if kind.__module__.startswith("pilotlight.common.errors.")
    ]
    failures = {kind.code for kind in served if issubclass(kind, TransientError | InternalError)}
    refusals = {kind.code for kind in served if issubclass(kind, CapacityError)}
    codes = {kind.code for kind in served}
    assert matched_by("PilotlightRequestsFail", codes) == failures
    assert 'code="bodies_full"' in RULES["PilotlightBodiesRefused"]["expr"]
    assert matched_by("PilotlightRequestsRefused", codes) == refusals - {
        "bodies_full",
        "rate_limit_exceeded",  # a tenant's own limit: there is nothing for an operator to do
    }


def matched_by(alert: str, codes: set[str]) -> set[str]:
    found = set(re.findall(r'status=~"([^"]+)"', RULES[alert]["expr"]))
    # The share and the number are of the same codes.
    (pattern,) = found
    return {code for code in codes if re.fullmatch(pattern, code)}
