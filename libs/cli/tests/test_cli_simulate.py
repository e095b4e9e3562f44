"""``pilotlight simulate cache``: a line of JSON for each policy, traces of one's own, refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pilotlight.cli.main import run
from pilotlight.policy.eviction.choice import POLICIES

CATALOGUE = "model,size_bytes,load_s\na,100,1.0\nb,100,2.0\nc,100,4.0\n"
TRACE = "time_s,model\n0,a\n1,b\n2,a\n3,c\n4,b\n"


def files(folder: Path, trace: str = TRACE, catalogue: str = CATALOGUE) -> list[str]:
    (folder / "trace.csv").write_text(trace)
    (folder / "catalogue.csv").write_text(catalogue)
    return ["--trace", str(folder / "trace.csv"), "--catalogue", str(folder / "catalogue.csv")]


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_for_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "cache", *files(tmp_path), "--capacity-bytes", "200", "--json"]
    assert run([*command, "--compare", "lru,pilotlight"]) == 0
    lru, ours = lines(capsys)
    assert (lru["policy"], ours["policy"]) == ("lru", "pilotlight")
    assert lru["load_s_per_request"] == pytest.approx(9.0 / 5)
    assert (lru["hit_ratio"], lru["reloads"], lru["p99_load_s"]) == (0.2, 1, 4.0)
    assert run(command) == 0
    assert [one["policy"] for one in lines(capsys)] == list(POLICIES)


def test_the_cache_is_a_fifth_of_the_catalogue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    catalogue = "model,size_bytes,load_s\n" + "".join(f"{name},50,1\n" for name in "abcdefghij")
    command = ["simulate", "cache", *files(tmp_path, catalogue=catalogue), "--compare", "lru"]
    assert run([*command, "--json"]) == 0
    (found,) = lines(capsys)
    assert found["capacity_bytes"] == 100
    assert run(command) == 0
    assert "reload s/request" in capsys.readouterr().out


def test_a_scenario_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "cache", "paper-random", "--compare", "lru,iam", "--json"]
    assert run(command) == 0
    first = lines(capsys)
    assert [one["requests"] for one in first] == [2389, 2389]
    assert run([*command, "--seed", "6"]) == 0
    assert lines(capsys) != first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "there is no scenario 'nothing'"),
        (["--compare", "lru,best"], "unknown policies: best"),
        (["--compare", ","], "none named"),
        (["--trace", "missing.csv"], "missing.csv cannot be read"),
        (["--catalogue", "missing.csv"], "needs a trace"),
    ],
)
def test_what_cannot_be_run_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "cache", *arguments, "--json"]) == 1
    assert said in lines(capsys)[0]["error"]["message"]


def test_a_trace_that_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "cache", *files(tmp_path, trace="time_s,model\n0,z\n"), "--json"]
    assert run(command) == 1
    assert "trace, line 2: z is not in the catalogue" in lines(capsys)[0]["error"]["message"]


def test_a_clusters_first_tokens_are_told_by_per_cent(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "paraserve-testbed-1", "--compare", "single", "--duration-s", "30"]
    assert run([*command, "--json"]) == 0
    (found,) = lines(capsys)
    assert found["policy"] == "single"
    assert found["requests"] > 0
    assert all(0 <= found[name] <= 1 for name in ("ttft_attainment", "tpot_attainment"))
    assert 0 < found["ttft_p50_s"] <= found["ttft_p99_s"]
    assert found["device_seconds"] > 0
    quantiles = [one for one in found["ttft_quantiles_s"] if one is not None]
    assert len(found["ttft_quantiles_s"]) == 100
    assert quantiles == sorted(quantiles)
    assert quantiles[49] == found["ttft_p50_s"]


def test_a_report_is_one_file_with_plots_of_every_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It loads nothing from anywhere: there is no address in it, and no script."""
    path, policies = tmp_path / "report.html", ("single", "locality", "paraserve", "pilotlight")
    command = ["simulate", "paraserve-testbed-1", "--compare", ",".join(policies)]
    assert run([*command, "--duration-s", "30", "--json", "--report", str(path)]) == 0
    found = lines(capsys)
    assert [one["policy"] for one in found] == list(policies)
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    page = path.read_text(encoding="utf-8")
    for outside in ("://", "src=", "href=", "url(", "@import", "<script", "<link"):
        assert outside not in page
    first_tokens, applications = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(re.findall(r"<polyline points=\"[-\d., ]+\"", first_tokens)) == len(policies)
    bars = len(re.findall(r"<rect[^>]* height=[\d.]+ fill=", applications))
    assert bars == len(policies) * 6 + len(policies), "applications, and the legend"
    for one in found:
        assert all(f">{one['policy']}</text>" in plot for plot in (first_tokens, applications))
        cells = (one["policy"], f"{one['ttft_attainment']:.3f}", str(one["requests"]))
        assert all(f"<td>{cell}</td>" in page for cell in cells)


def test_a_report_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", "paraserve-testbed-1", "--compare", "single", "--duration-s", "5"]
    assert run([*command, "--json", "--report", str(tmp_path / "no" / "report.html")]) == 1
    assert "the report cannot be written" in lines(capsys)[-1]["error"]["message"]
