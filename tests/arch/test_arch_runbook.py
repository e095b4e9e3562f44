"""The operator's pages: an entry for each error code, links that lead somewhere, commands and
settings that exist.
"""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import pilotlight.cli
from pilotlight.cli.main import app
from pilotlight.common.device_health import (
    XIDS,
    DeviceReading,
    Judgement,
    Recovery,
    XidClass,
    judge,
)
from pilotlight.common.errors import MachineUnfit, SettingsInvalid, all_errors
from pilotlight.policy.cluster import HealthState

ROOT = Path(__file__).resolve().parents[2]
BAD_DAY = (ROOT / "docs/operations/bad-day.md").read_text()
PAGES = "\n".join(page.read_text() for page in sorted((ROOT / "docs/operations").glob("*.md")))
RUNBOOK = BAD_DAY[BAD_DAY.index("\n## What an error code means") :].split("\n## ", 2)[1]
ENTRIES = {
    code: text.strip()
    for code, text in re.findall(
        r"^#### `(\w+)`\n(.*?)(?=^#{2,4} |\Z)", RUNBOOK, re.DOTALL | re.MULTILINE
    )
}


def codes() -> dict[str, set[int]]:
    """Each code that something of ours may end with, and its statuses."""
    for module in pkgutil.iter_modules(pilotlight.cli.__path__):
        if module.name != "__main__":
            importlib.import_module(f"pilotlight.cli.{module.name}")
    for service in ("gateway", "scheduler", "cache", "loader", "worker", "materializer"):
        package = importlib.import_module(f"pilotlight.{service}")
        for module in pkgutil.walk_packages(package.__path__, f"pilotlight.{service}."):
            if not module.name.endswith(("__main__", ".testing")) and ".child" not in module.name:
                importlib.import_module(module.name)
    found: dict[str, set[int]] = {}
    for kind in all_errors():
        if kind.__module__.startswith("pilotlight."):
            found.setdefault(kind.code, set()).add(kind.status)
    return found


def test_each_code_has_an_entry_and_each_entry_a_code() -> None:
    headings = re.findall(r"^#### (.*)$", RUNBOOK, re.MULTILINE)
    assert len(headings) == len(set(headings)) == len(ENTRIES)
    assert set(ENTRIES) == codes().keys()


@pytest.mark.parametrize("code", ENTRIES)
def test_an_entry_says_what_is_seen_and_what_to_do(code: str) -> None:
    text = ENTRIES[code]
    assert re.search(r"\*Look\*", text)
    assert re.search(r"\*Do\*|\*do\*", text)
    told = re.match(r"\*\*(\d{3})", text)
    if told is not None:
        assert codes()[code] == {int(told[1])}
    else:
        never_served = (SettingsInvalid, MachineUnfit)
        kinds = {kind for kind in all_errors() if kind.code == code}
        assert all(
            issubclass(kind, never_served) or kind.__module__.startswith("pilotlight.cli.")
            for kind in kinds
        )


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def links_of(page: Path) -> list[str]:
    """The links of a page that lead to files or headings of the repository."""
    return re.findall(r"\]\((?!https?://)([^)\s]*)\)", page.read_text())


def test_each_section_of_the_operators_pages_is_in_their_index() -> None:
    folder = ROOT / "docs/operations"
    told = set(links_of(folder / "README.md"))
    for page in sorted(folder.glob("*.md")):
        if page.name != "README.md":
            headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
            assert {f"{page.name}#{slug(heading)}" for heading in headings} <= told


@pytest.mark.parametrize(
    "name",
    [
        str(page.relative_to(ROOT))
        for page in (*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md")))
    ],
)
def test_links_lead_somewhere(name: str) -> None:
    file = ROOT / name
    for link in links_of(file):
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+\s+(.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, link


def test_pages_that_messages_name_exist() -> None:
    """An error tells its reader where to look: the page has to be there."""
    sources = [
        *ROOT.glob("*/*/src/**/*.py"),
        *ROOT.glob("deploy/prometheus/*.yml"),
        ROOT / "docker-compose.yml",
    ]
    named = {
        page for file in sources for page in re.findall(r"\bdocs/[\w./-]+\.md", file.read_text())
    }
    assert "docs/operations/bad-day.md" in named
    assert not [page for page in sorted(named) if not (ROOT / page).is_file()]


def test_settings_that_are_named_exist() -> None:
    known = set(re.findall(r"PILOTLIGHT_[A-Z0-9_]+", (ROOT / "docs/settings.md").read_text()))
    known |= set(re.findall(r"PILOTLIGHT_[A-Z0-9_]+", (ROOT / "docker-compose.yml").read_text()))
    assert set(re.findall(r"PILOTLIGHT_[A-Z0-9_]+", PAGES)) <= known


def test_settings_of_retention_are_all_told() -> None:
    settings = (ROOT / "docs/settings.md").read_text()
    named = set(re.findall(r"`(PILOTLIGHT_\w+_(?:KEEP_DAYS|MAX_ROWS))`", settings))
    assert named <= set(re.findall(r"`(PILOTLIGHT_\w+)`", PAGES))
    assert len(named) > 10


def test_commands_that_are_named_exist() -> None:
    groups = {"model", "node"}
    named = set(
        re.findall(r"(?:^|[`$( ])pilotlight ((?:model|node) [a-z]+|[a-z]+)", PAGES, re.MULTILINE)
    )
    words = {word for word in named if word.split()[0] not in groups or " " in word}
    assert len(words) > 10
    for word in words:
        _, _, rest = app.parse_commands(word.split())
        assert not rest, f"there is no command `pilotlight {word}`"


def test_the_table_of_xids_is_that_of_the_policy() -> None:
    table = BAD_DAY[BAD_DAY.index("\n| Xid | whose |") :].split("\n\n", 1)[0]
    rows = [row.split("|")[1:3] for row in table.strip().splitlines()[2:]]
    told = {
        int(number): whose.strip()
        for numbers, whose in rows
        for number in re.findall(r"\d+", numbers)
    }
    words = {
        XidClass.APPLICATION: "the program's",
        XidClass.WEAR: "wear",
        XidClass.DEVICE: "the device's",
    }
    assert told == {number: words[xid.kind] for number, xid in XIDS.items()} | {
        154: "an announcement"
    }


def test_the_reasons_of_a_devices_health_have_their_rows() -> None:
    section = BAD_DAY[BAD_DAY.index("\n## A GPU fails") :].split("\n## ", 2)[1]
    told = set(re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE))
    readings = [
        *(DeviceReading(recovery=recovery) for recovery in Recovery),
        DeviceReading(late_s=9.0),
        DeviceReading(lost="gone"),
        DeviceReading(untold="an error"),
        DeviceReading(remap_failed=True),
        DeviceReading(remap_pending=True),
        DeviceReading(uncorrected_errors=1),
        DeviceReading(memory_bytes=100, used_bytes=100, own_bytes=0),
        *(DeviceReading(xids=(number,)) for number in XIDS),
    ]
    reasons = {
        judge(Judgement(), reading, promised_bytes=100).health.reason.partition(":")[0]
        for reading in readings
    }
    states = {state.value for state in HealthState}
    assert told == (reasons - {""}) | states
