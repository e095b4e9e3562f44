"""What a user does with the dashboard, in a browser and on a whole system."""

import gzip
import hashlib
import os
from pathlib import Path
from typing import Any

import httpx2
import pytest
from embedded_system import RunningSystem, eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.anyio]

MODEL = "ember-7m"
PAGES = {
    "fleet": "/",
    "models": "/models",
    "model": f"/models/{MODEL}",
    "cold-starts": "/cold-starts",
    "traces": "/traces",
    "audit": "/events",
    "evictions": "/events?kind=evictions",
    "decisions": "/events?kind=decisions",
    "keys": "/keys",
    "usage": "/usage",
    "simulations": "/simulations",
    "playground": "/playground",
}
PICTURES = os.environ.get("PILOTLIGHT_UI_PICTURES")
"""A folder for pictures of all pages, where they are wanted."""


async def chat(page: Any, text: str) -> str:
    """Ask in the playground; the whole answer."""
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")
    await page.wait_for_selector("#f-tokens:text-matches('[0-9]')", timeout=60_000)
    await page.wait_for_selector("#send:visible")
    return await page.locator(".turn.assistant .said").last.inner_text()


async def picture(tab: Any, theme: str, name: str) -> None:
    if PICTURES is not None:
        await tab.page.screenshot(path=Path(PICTURES) / f"{theme}-{name}.png", full_page=True)


async def test_a_cold_model_is_asked_and_its_start_is_looked_at(
    system: RunningSystem, open_tab: Any
) -> None:
    tab = await open_tab(system.url)
    page = tab.page
    await tab.sign_in(system.key("admin"))
    with system.admin() as http:
        http.post(f"/models/{MODEL}/evict")
    await tab.open(f"/playground?model={MODEL}")
    assert "pilot light" in (await chat(page, "What is a pilot light?")).lower()
    assert "PILOTLIGHT_API_KEY" in await page.inner_text("#as-curl")
    await page.click("#f-links a")
    await page.wait_for_url("**/ui/traces/*")
    assert await page.locator(".waterfall tbody tr").count() >= 3
    await page.click(".alert.calm a")
    await page.wait_for_url("**/ui/cold-starts/*")
    # Its last phases come a moment after its first token, and the page follows by itself.
    await page.wait_for_selector(".pill-done", timeout=30_000)
    names = await page.locator(".waterfall tbody th").all_inner_texts()
    assert {"fetch", "load", "prefill"} <= {name.split()[0] for name in names}
    assert await page.locator(".reasons li").count() >= 1
    assert "Predicted first token" in await page.inner_text("#main")


async def test_a_cold_start_is_watched_while_it_happens(
    system: RunningSystem, open_tab: Any
) -> None:
    tab, watching = await open_tab(system.url), await open_tab(system.url)
    for one in (tab, watching):
        await one.sign_in(system.key("admin"))
    with system.admin() as http:
        uri = http.get(f"/models/{MODEL}").json()["uri"]
        slo = {"ttft_ms": 9000, "tpot_ms": 900}
        http.post("/models", json={"name": "watched", "uri": uri, "slo": slo})
        http.post(f"/models/{MODEL}/evict")
        (node,) = http.get("/nodes").json()["nodes"]
        # An empty host pool: the parameters come over the slow link again.
        http.post(f"/nodes/{node['node_id']}/drain")
        eventually(lambda: http.get("/nodes").json()["nodes"][0]["state"] == "drained", 60)
        http.delete(f"/nodes/{node['node_id']}/drain")
    await watching.open("/cold-starts")
    await tab.open("/playground?model=watched")
    await tab.page.fill("#prompt", "What is a pilot light?")
    await tab.page.press("#prompt", "Enter")
    await watching.page.locator("tr.row", has_text="watched").locator("a").first.click()
    await watching.page.wait_for_selector("#start-part .bar-of.open")
    assert await watching.page.locator("#start-part .pill-starting").count() == 1
    await picture(watching, "light", "cold-start-live")
    await tab.page.wait_for_selector("#progress-text:text-matches('Cold start: ')")
    await picture(tab, "light", "playground-cold")
    await watching.page.wait_for_selector("#start-part .pill-done", timeout=60_000)
    await watching.page.wait_for_selector("#start-part .phase-deliver", state="attached")
    await picture(watching, "light", "cold-start-done")
    await tab.page.wait_for_selector("#f-tokens:text-matches('[0-9]')", timeout=60_000)
    with system.admin() as http:
        http.delete("/models/watched")


async def test_links_are_told_with_what_goes_over_them(
    system: RunningSystem, open_tab: Any
) -> None:
    tab = await open_tab(system.url)
    page = tab.page
    with system.admin() as http:
        assert http.post(f"/models/{MODEL}/warm").is_success
        eventually(lambda: http.get("/transfers").json()["links"], 60)
    await tab.sign_in(system.key("admin"))
    row = page.locator("#links tr.row", has_text="file://")
    await row.wait_for()
    assert "/s" in await row.inner_text()
    await page.wait_for_selector("#groups .empty:has-text('No instance is shared')")
    assert await tab.violations() == []
    await row.get_by_role("link").click()
    await page.wait_for_url("**/ui/nodes/*")


async def test_models_tell_what_they_cost(system: RunningSystem, open_tab: Any) -> None:
    tab = await open_tab(system.url)
    page = tab.page
    with system.admin() as http:
        assert http.post(f"/models/{MODEL}/warm").is_success
        told = eventually(
            lambda: [
                one
                for one in http.get("/usage/models").json()["models"]
                if one["model"] == MODEL and one["start_device_s"] > 0
            ],
            60,
        )
    assert told
    await tab.sign_in(system.key("admin"))
    await tab.open("/models")
    row = page.locator("#models tr.row", has_text=MODEL).first
    cost = row.locator("[title*='cold starts']")
    await cost.wait_for()
    assert "loaded and idle" in (await cost.get_attribute("title") or "")
    await page.get_by_role("button", name="Cost, 30 days").click()
    assert await page.get_attribute("#models th:has-text('Cost')", "aria-sort") == "descending"
    await row.get_by_role("link").click()
    await page.wait_for_url(f"**/ui/models/{MODEL}")
    assert "For cold starts" in await page.inner_text("#cost")
    await page.click("#cost >> text=By day and key")
    await page.wait_for_selector(f"#usage-part th:has-text('{MODEL}')")


async def test_a_model_is_registered_changed_warmed_released_and_deleted(
    system: RunningSystem, open_tab: Any
) -> None:
    tab = await open_tab(system.url)
    page = tab.page
    page.on("dialog", lambda dialog: dialog.accept())
    with system.admin() as http:
        uri = http.get(f"/models/{MODEL}").json()["uri"]
    await tab.sign_in(system.key("admin"))
    await page.click("nav >> text=Models")
    await page.click("#register-open")
    await page.fill("#r-name", "team/second")
    await page.fill("#r-uri", uri)
    await page.click("dialog button[type=submit]")
    await page.wait_for_url("**/ui/models/team/second")
    await page.click("text=Warm")
    await page.wait_for_selector("#model-part .pill-ready", timeout=60_000)
    await page.fill("#c-ttft", "4321")
    await page.click(".settings button[type=submit]")
    await page.wait_for_selector(".toast:has-text('Saved')")
    await page.click("#model-part >> text=Pin")
    await page.wait_for_selector("#model-part .pill-pinned")
    with system.admin() as http:
        changed = http.get("/models/team/second").json()
    assert (changed["slo"]["ttft_ms"], changed["pinned"]) == (4321, True)
    await page.click("#model-part >> text=Evict")
    await page.wait_for_selector("#model-part .pill-cold", timeout=60_000)
    await page.click("text=Delete the model")
    await page.wait_for_url("**/ui/models")
    await page.wait_for_selector(f"#models >> text={MODEL}")
    await page.wait_for_selector("#models >> text=team/second", state="detached")
    await tab.open("/events")
    assert "model_delete" in await page.inner_text("#events-part")


async def test_a_refused_registration_says_why(system: RunningSystem, open_tab: Any) -> None:
    tab = await open_tab(system.url)
    page = tab.page
    await tab.sign_in(system.key("admin"))
    await tab.open("/models")
    await page.click("#register-open")
    await page.fill("#r-name", "elsewhere")
    await page.fill("#r-uri", "file:///etc")
    await page.click("dialog button[type=submit]")
    alert = page.locator("dialog [role=alert]")
    await alert.wait_for(state="visible")
    assert "root" in await alert.inner_text()
    # The browser names each answer of 400 and above on the console.
    tab.wrong = [one for one in tab.wrong if "status of 422" not in one]


async def test_a_key_is_made_used_billed_and_revoked(system: RunningSystem, open_tab: Any) -> None:
    tab = await open_tab(system.url)
    page = tab.page
    page.on("dialog", lambda dialog: dialog.accept())
    await tab.sign_in(system.key("admin"))
    await page.click("nav >> text=Keys")
    await page.click("#make-open")
    await page.fill("#k-label", "browser")
    await page.fill("#k-models", f"{MODEL}, other*")
    await page.click("#make button[type=submit]")
    await page.wait_for_selector("#made[open]")
    key = await page.input_value("#made-key")
    await page.click("#made [data-close]")
    from playwright.async_api import expect

    # The page hears of the dialog's end a moment later.
    await expect(page.locator("#made-key")).to_have_value("")
    row = page.locator("#keys-part tr", has_text="browser")
    await row.wait_for()
    assert "other*" in await row.inner_text()
    body = {"model": MODEL, "prompt": "A pilot light", "max_tokens": 4, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}"}
    url = f"{system.url}/v1/completions"
    asked = httpx2.post(url, json=body, headers=headers, timeout=60)
    assert asked.status_code == 200, asked.text
    with system.admin() as http:
        eventually(lambda: "browser" in http.get("/usage?format=csv").text, 20)
    await row.get_by_text("Usage").click()
    await page.wait_for_selector("#usage-part td:has-text('browser')")
    # A filter is followed without a new page.
    await page.evaluate("() => { window.stayed = true; }")
    await page.fill("#u-model", "none")
    await page.press("#u-model", "Enter")
    await page.wait_for_selector("#usage-part .empty")
    await page.fill("#u-model", "")
    await page.press("#u-model", "Enter")
    await page.wait_for_selector("#usage-part td:has-text('browser')")
    assert await page.evaluate("() => window.stayed")
    async with page.expect_download() as download:
        await page.click("text=CSV")
    assert "browser" in (await (await download.value).path()).read_text()
    await tab.open("/keys")
    await row.get_by_role("button", name="Revoke").click()
    await row.wait_for(state="detached")
    eventually(lambda: httpx2.post(url, json=body, headers=headers).status_code == 401, 10)


async def test_a_key_is_limited_and_another_comes_in_its_place(
    system: RunningSystem, open_tab: Any
) -> None:
    tab = await open_tab(system.url)
    page = tab.page
    with system.admin() as http:
        made = http.post("/keys", json={"label": "turning", "routes": ["/v1/models"]}).json()
    await tab.sign_in(system.key("admin"))
    await tab.open("/keys")
    row = page.locator("#keys-part tr", has_text="turning")
    await row.get_by_role("button", name="Limits").click()
    assert await page.inner_text("#limits-title") == "Limits of turning"
    assert await tab.violations() == []
    await page.fill("#l-requests_per_minute", "2")
    await page.click("#limits button[type=submit]")
    await row.get_by_text("requests per minute 2").wait_for()
    await row.get_by_role("button", name="Limits").click()
    assert await page.input_value("#l-requests_per_minute") == "2"
    await page.click("#limits [data-close]")
    await row.get_by_role("button", name="Rotate").click()
    await page.fill("#o-overlap", "0")
    assert await tab.violations() == []
    await page.click("#rotate button[type=submit]")
    await page.wait_for_selector("#made[open]")
    key = await page.input_value("#made-key")
    url = f"{system.url}/v1/models"

    def status(shown: str) -> int:
        headers = {"authorization": f"Bearer {shown}"}
        return httpx2.get(url, headers=headers, timeout=30).status_code

    assert (status(key), key == made["key"]) == (200, False)
    eventually(lambda: status(made["key"]) == 401, 10)


async def test_a_session_that_ended_leads_to_the_form(system: RunningSystem, open_tab: Any) -> None:
    tab = await open_tab(system.url)
    page = tab.page
    await tab.sign_in(system.key("admin"))
    await page.click("text=Sign out")
    await page.wait_for_url("**/ui/sign-in")
    await page.goto(f"{system.url}/ui/models/{MODEL}")
    await page.fill("#key", system.key("admin"))
    await page.click("button[type=submit]")
    await page.wait_for_url(f"**/ui/models/{MODEL}")


async def test_it_is_used_by_keyboard_alone(system: RunningSystem, open_tab: Any) -> None:
    tab = await open_tab(system.url)
    page = tab.page
    await page.goto(f"{system.url}/ui/")
    await page.keyboard.type(system.key("admin"))
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/ui/")
    await page.keyboard.press("Tab")
    assert await page.evaluate("() => document.activeElement.textContent") == "Skip to content"
    await page.keyboard.press("Enter")
    await page.wait_for_selector("#nodes tr.row a")
    for _ in range(12):
        await page.keyboard.press("Tab")
        if await page.evaluate("() => document.activeElement.closest('#nodes tr.row') !== null"):
            break
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/ui/nodes/*")


@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_every_page_is_accessible_in_both_themes(
    system: RunningSystem, open_tab: Any, theme: str
) -> None:
    tab = await open_tab(system.url, theme)
    page = tab.page
    await page.goto(f"{system.url}/ui/")
    found = {"sign-in": await tab.violations()}
    await picture(tab, theme, "sign-in")
    await tab.sign_in(system.key("admin"))
    await tab.open(f"/playground?model={MODEL}")
    await chat(page, "What is a pilot light?")
    found["chat"] = await tab.violations()
    await picture(tab, theme, "chat")
    for name, path in PAGES.items():
        await tab.open(path)
        await page.wait_for_load_state("load")
        if name in ("fleet", "models", "cold-starts"):
            await page.wait_for_selector("tr.row")
        found[name] = await tab.violations()
        await picture(tab, theme, name)
    for start, name in (("/", "node"), ("/cold-starts", "cold-start")):
        await tab.open(start)
        await page.locator("tr.row a").first.click()
        await page.wait_for_selector(".crumbs")
        found[name] = await tab.violations()
        await picture(tab, theme, name)
    assert {name: one for name, one in found.items() if one} == {}
    ground = await page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
    assert ground == {"light": "rgb(245, 246, 248)", "dark": "rgb(15, 20, 27)"}[theme]


async def test_a_chosen_theme_stays(system: RunningSystem, open_tab: Any) -> None:
    tab = await open_tab(system.url, "light")
    page = tab.page
    await tab.sign_in(system.key("admin"))
    await page.click("#theme-button")
    await page.click("#theme-button")
    await tab.open("/models")
    assert await page.get_attribute("html", "data-theme") == "dark"
    assert await page.inner_text("#theme-name") == "dark"


def test_axe_is_the_one_that_is_named() -> None:
    vendor = Path(__file__).parent / "vendor"
    script = gzip.decompress((vendor / "axe.min.js.gz").read_bytes())
    digest = hashlib.sha256(script).hexdigest()
    assert f"`{digest}`" in (vendor / "README.md").read_text()
