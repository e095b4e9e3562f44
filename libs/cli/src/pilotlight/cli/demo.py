"""``pilotlight demo``: a cold chat, a warm one, and where the time went."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

from openai import OpenAI, OpenAIError
from rich.markup import escape
from rich.panel import Panel

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_MODEL, DEMO_PROMPT, demo_model_folder, ensure_demo_model
from pilotlight.cli.home import Home
from pilotlight.cli.output import console
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.cli.waterfall import bars_of, draw, is_whole, seconds_within
from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.errors import NotFound, PilotlightError
from pilotlight.common.waiting import pause

MIB = 1024 * 1024
POOL_BYTES = 256 * MIB
CHAT_DEADLINE_S = 120.0
RECORD_DEADLINE_S = 15.0


class DemoFailed(PilotlightError):
    """The demo did not come to its end."""

    code = "demo_failed"
    action = "Check the machine with `pilotlight doctor`; the message names the logs."


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One streamed answer."""

    text: str
    ttft_s: float
    output_tokens: int
    trace_id: str


async def run_demo(home: Home, link: str, *, as_json: bool) -> int:
    """Run the demo on a state folder of its own, so that it disturbs nothing.

    The last line is ``RESULT`` and JSON; with ``as_json`` there is the JSON alone.

    Raises:
        DemoFailed: it got no answer, or no record of the cold start.
    """
    own = Home(home.root / "demo")
    options = SystemOptions(
        port=free_port(), link=link, pool_bytes=POOL_BYTES, model_roots=(demo_model_folder(),)
    )
    clock = SystemClock()

    def progress(what: str) -> None:
        if not as_json:
            console.print(f"[dim]… {escape(what)}[/]")

    async with System(own, options, progress):
        result = await asyncio.to_thread(_converse, own, options, clock, progress, as_json)
        progress("stopping")
    if not as_json:
        console.print("`make up` keeps it running and says what to try.\n")
    print(("" if as_json else "RESULT ") + json.dumps(result), flush=True)
    return 0


def _converse(
    home: Home, options: SystemOptions, clock: Clock, progress: Any, as_json: bool
) -> dict[str, Any]:
    with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
        _forget_demo_model(admin)
        ensure_demo_model(admin)
        limit = f"; its parameters come at {options.link}" if options.link else ""
        progress(f"asking {DEMO_MODEL}, which is loaded nowhere{limit}")
        try:
            cold = _chat(options, home, clock)
            warm = _chat(options, home, clock)
        except OpenAIError as error:
            raise DemoFailed(
                f"{DEMO_MODEL} did not answer: {error}; the logs are in {home.logs}"
            ) from error
        record = _cold_start_of(admin, home, cold.trace_id, clock)
        devices = [worker["device"] for worker in admin.get("/workers")["workers"]]
    phases: dict[str, float] = {}
    bars = bars_of(record["phases"])
    for bar in bars:
        phases[bar.name] = round(phases.get(bar.name, 0.0) + bar.total_s, 4)
    if not as_json:
        console.print(
            Panel(f"[bold]{DEMO_PROMPT}[/]\n{escape(cold.text)}", title=DEMO_MODEL, expand=False)
        )
        cold_ms, warm_ms = cold.ttft_s * 1000, warm.ttft_s * 1000
        console.print(
            f"What the client saw: the first token after {cold_ms:,.0f} ms cold, after {warm_ms:,.0f} ms warm."
        )
        console.print("Where the time of the cold start went:\n")
        console.print(draw(record, console.width))
    return {
        "model": DEMO_MODEL,
        "cold_ttft_s": round(cold.ttft_s, 4),
        "warm_ttft_s": round(warm.ttft_s, 4),
        "output_tokens": cold.output_tokens,
        "phases": phases,
        "while_fetching": {
            name: round(seconds_within(bars, name, "fetch"), 4) for name in ("load", "prefill")
        },
        "phase_coverage": round(record["coverage"], 4),
        "trace_id": cold.trace_id,
        "devices": [{"kind": device["kind"], "name": device["name"]} for device in devices],
    }


def _chat(options: SystemOptions, home: Home, clock: Clock) -> Chat:
    key = home.api_key.read_text().strip()
    with OpenAI(
        base_url=options.url + "/v1", api_key=key, timeout=CHAT_DEADLINE_S, max_retries=0
    ) as client:
        # The client connects and imports when it is first used, and its time is not the system's.
        client.models.list()
        completions = client.chat.completions.with_streaming_response
        began_s = clock.monotonic_s()
        with completions.create(
            model=DEMO_MODEL,
            messages=[{"role": "user", "content": DEMO_PROMPT}],
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        ) as response:
            trace_id = response.headers.get("x-trace-id", "")
            text, first_s, tokens = "", None, 0
            for chunk in response.parse():
                if chunk.choices and chunk.choices[0].delta.content:
                    first_s = first_s if first_s is not None else clock.monotonic_s()
                    text += chunk.choices[0].delta.content
                if chunk.usage is not None:
                    tokens = chunk.usage.completion_tokens
    if first_s is None:
        raise DemoFailed(
            f"{DEMO_MODEL} answered without a single token; the logs are in {home.logs}"
        )
    return Chat(text=text, ttft_s=first_s - began_s, output_tokens=tokens, trace_id=trace_id)


def _cold_start_of(admin: AdminClient, home: Home, trace_id: str, clock: Clock) -> dict[str, Any]:
    """The finished record; the last phases reach it a moment after the first token."""
    deadline_s = clock.monotonic_s() + RECORD_DEADLINE_S
    while clock.monotonic_s() < deadline_s:
        record: dict[str, Any] = {"status": "open", "phases": []}
        # Its rows are written a moment after the answer.
        with contextlib.suppress(NotFound):
            record = next(iter(admin.get(f"/traces/{trace_id}")["cold_starts"]), record)
        if is_whole(record):
            return record
        asyncio.run(pause(0.1))
    raise DemoFailed(
        f"no finished cold start belongs to trace {trace_id}; the logs are in {home.logs}"
    )


def _forget_demo_model(admin: AdminClient) -> None:
    try:
        admin.delete(f"/models/{DEMO_MODEL}")
    except NotFound:
        return
