"""Results of simulations, opened where a real fleet is looked at."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from embedded_system import RunningSystem, pilotlight

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.anyio]

PICTURES = os.environ.get("PILOTLIGHT_UI_PICTURES")


def simulated(folder: Path, *arguments: str) -> Path:
    """What the command line writes of a short simulation."""
    command = [pilotlight(), "simulate", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    file = folder / "results.jsonl"
    file.write_text(done.stdout)
    return file


async def test_a_comparison_of_clusters(
    system: RunningSystem, open_tab: Any, tmp_path: Path
) -> None:
    file = simulated(
        tmp_path, "paraserve-testbed-1", "--compare", "single,pilotlight", "--duration-s", "60"
    )
    tab = await open_tab(system.url)
    page = tab.page
    await tab.sign_in(system.key("admin"))
    await page.click("nav >> text=Simulations")
    await page.set_input_files("#s-file", file)
    await page.wait_for_selector("#s-table tbody tr:nth-child(2)")
    policies = await page.locator("#s-table tbody th").all_inner_texts()
    assert policies == ["single", "pilotlight"]
    assert await page.locator("#s-curves polyline").count() == 2
    assert await page.locator("#s-bars tbody tr").count() >= 1
    assert await page.inner_text("#s-scenario") == "paraserve-testbed-1"
    assert await tab.violations() == []
    if PICTURES is not None:
        await page.screenshot(path=Path(PICTURES) / "light-simulations-read.png", full_page=True)


async def test_a_comparison_of_caches_and_what_is_none(
    system: RunningSystem, open_tab: Any, tmp_path: Path
) -> None:
    file = simulated(tmp_path, "cache", "paper-random", "--compare", "lru,iam")
    other = tmp_path / "other.json"
    other.write_text('{"policy": "lru"}\nnot json\n')
    tab = await open_tab(system.url)
    page = tab.page
    await tab.sign_in(system.key("admin"))
    await tab.open("/simulations")
    await page.set_input_files("#s-file", file)
    await page.wait_for_selector("#s-table >> text=Load a request")
    assert await page.locator("#s-first").is_hidden()
    await page.set_input_files("#s-file", other)
    await page.wait_for_selector("#s-failure:has-text('Line 2 is no JSON')")
    assert await page.locator("#s-results").is_hidden()
