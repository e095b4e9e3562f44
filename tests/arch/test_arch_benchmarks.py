"""The benchmarks' page and the results behind it: nothing it names is missing, and each figure says
where it comes from.
"""

import datetime
import json
import re
import statistics
from pathlib import Path
from typing import Any, cast

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "benchmarks.md").read_text()
RESULTS = sorted((ROOT / "bench/results").glob("*.json"))
NOT_RECORDED = "not recorded"
NAMED = ("what", "command", "machine", "load", "commit", "commit_date", "date", "unit")
ROUNDED = 0.02
"""A page states medians in two or three digits."""


def measurements(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["measurements"]


def numbers(samples: Any) -> list[float]:
    """All samples, of runs that stand in lists of their own, too."""
    if isinstance(samples, list):
        found: list[float] = []
        for sample in cast("list[Any]", samples):
            found += numbers(sample)
        return found
    assert isinstance(samples, int | float), samples
    return [samples]


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_results_say_where_they_come_from(file: Path) -> None:
    found = measurements(file)
    assert json.loads(file.read_text())["benchmark"] == file.stem
    assert len({measured["what"] for measured in found}) == len(found) > 0
    for measured in found:
        assert all(isinstance(measured[name], str) and measured[name] for name in NAMED), measured[
            "what"
        ]
        assert re.fullmatch(r"[0-9a-f]{7}", measured["commit"]), measured["what"]
        datetime.date.fromisoformat(measured["commit_date"])
        if measured["date"] != NOT_RECORDED:
            datetime.date.fromisoformat(measured["date"])


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_medians_are_those_of_the_samples(file: Path) -> None:
    for measured in measurements(file):
        if measured["samples"] == NOT_RECORDED:
            continue
        for name, samples in measured["samples"].items():
            if samples == NOT_RECORDED:
                continue
            found = numbers(samples)
            assert found, f"{measured['what']}: {name}"
            if name in measured.get("medians", {}):
                assert statistics.median(found) == pytest.approx(
                    measured["medians"][name], rel=ROUNDED
                ), measured["what"]


def test_the_page_and_its_pictures_name_each_other() -> None:
    named = set(re.findall(r"!\[[^\]]+\]\((pictures/[^)]+)\)", PAGE))
    assert named == {f"pictures/{file.name}" for file in (DOCS / "pictures").iterdir()}


def test_the_page_names_every_result() -> None:
    named = set(re.findall(r"\(\.\./bench/results/([^)]+)\)", PAGE))
    assert named == {file.name for file in RESULTS}


def test_the_page_names_no_commit_that_the_results_lack() -> None:
    known = {measured["commit"] for file in RESULTS for measured in measurements(file)}
    named = set(re.findall(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7}\b", PAGE))
    # Other numbers of seven digits are no commits.
    named |= {commit for commit in known if commit.isdigit() and re.search(rf"\b{commit}\b", PAGE)}
    assert named == known


def test_links_within_the_page_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= headings
