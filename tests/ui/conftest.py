"""A browser, and pages that fail a test by what they say on the console."""

import gzip
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from embedded_system import RunningSystem, running

CHROMIUM = "/usr/bin/chromium"
AXE = Path(__file__).parent / "vendor" / "axe.min.js.gz"
WIDTH, HEIGHT = 1440, 900


@pytest.fixture(scope="session")
def system() -> Iterator[RunningSystem]:
    """A whole system with the demo model, whose link is slow enough that a cold start is seen."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-ui-") as folder:
        os.chmod(folder, 0o711)
        with running(Path(folder) / "home", "--with-demo-model", "--link", "20mbit") as started:
            yield started


@pytest.fixture
async def browser(anyio_backend: str) -> AsyncIterator[Any]:
    """Chromium."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        await started.close()


class Tab:
    """A page, and what went wrong on it."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.wrong: list[str] = []
        page.on(
            "console",
            lambda said: (
                self.wrong.append(said.text) if said.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: self.wrong.append(str(error)))

    async def sign_in(self, key: str) -> None:
        """Come in by the form."""
        await self.page.goto(f"{self.url}/ui/")
        await self.page.fill("#key", key)
        await self.page.click("button[type=submit]")
        await self.page.wait_for_url("**/ui/")

    async def open(self, path: str) -> None:
        """Go to a page of the dashboard."""
        answer = await self.page.goto(f"{self.url}/ui{path}")
        assert answer.ok, (path, answer.status)

    async def violations(self) -> list[str]:
        """What axe finds against WCAG 2.1 A and AA."""
        found = await self.page.evaluate(
            "() => axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa']})"
        )
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
            for one in found["violations"]
        ]


@pytest.fixture
async def open_tab(browser: Any) -> AsyncIterator[Any]:
    """Opens tabs; each must have said nothing on its console by the end of the test."""
    tabs: list[Tab] = []

    async def make(url: str, theme: str = "light") -> Tab:
        context = await browser.new_context(
            viewport={"width": WIDTH, "height": HEIGHT},
            color_scheme=theme,
            reduced_motion="reduce",
        )
        # Before any page's own scripts, and beside its security policy.
        await context.add_init_script(gzip.decompress(AXE.read_bytes()).decode())
        tab = Tab(await context.new_page(), url)
        tabs.append(tab)
        return tab

    yield make
    for tab in tabs:
        await tab.page.context.close()
        assert tab.wrong == [], tab.wrong
