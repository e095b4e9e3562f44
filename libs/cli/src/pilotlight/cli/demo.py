"""``pilotlight demo``: a cold chat, a warm one, and where the time went."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.markup import escape
from rich.panel import Panel

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import DEMO_MODEL, DEMO_PROMPT, demo_model_folder, ensure_demo_model
from pilotlight.cli.home import Home
from pilotlight.cli.output import console
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.cli.waterfall import bars_of, draw
from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.errors import DeadlineExceeded, NotFound
from pilotlight.common.waiting import pause

MIB = 1024 * 1024
POOL_BYTES = 256 * MIB
CHAT_DEADLINE_S = 120.0
RECORD_DEADLINE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One streamed answer."""

    text: str
    ttft_s: float
    output_tokens: int
    trace_id: str


async def run_demo(home: Home, link: str, *, as_json: bool) -> int:
    """Run the demo on a state folder of its own, so that it disturbs nothing; the last line is ``RESULT`` and JSON."""
    own = Home(home.root / "demo")
    options = SystemOptions(port=free_port(), link=link, pool_bytes=POOL_BYTES, model_roots=(demo_model_folder(),))
    clock = SystemClock()

    def progress(what: str) -> None:
        if not as_json:
            console.print(f"[dim]… {escape(what)}[/]")

    async with System(own, options, progress):
        result = await asyncio.to_thread(_converse, own, options, clock, progress, as_json)
        progress("stopping")
    print("RESULT " + json.dumps(result), flush=True)
    return 0


def _converse(home: Home, options: SystemOptions, clock: Clock, progress: Any, as_json: bool) -> dict[str, Any]:
    with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
        _forget_demo_model(admin)
        ensure_demo_model(admin)
        progress(f"asking {DEMO_MODEL}, which is loaded nowhere (link limited to {options.link or 'nothing'})")
        cold = _chat(options, home.api_key, clock)
        warm = _chat(options, home.api_key, clock)
        record = _cold_start_of(admin, cold.trace_id, clock)
    phases: dict[str, float] = {}
    for bar in bars_of(record["phases"]):
        phases[bar.name] = round(phases.get(bar.name, 0.0) + bar.total_s, 4)
    if not as_json:
        console.print(Panel(f"[bold]{DEMO_PROMPT}[/]\n{escape(cold.text)}", title=DEMO_MODEL, expand=False))
        console.print(f"cold: first token after {cold.ttft_s * 1000:,.0f} ms   warm: after {warm.ttft_s * 1000:,.0f} ms\n")
        console.print(draw(record, console.width))
    return {
        "model": DEMO_MODEL,
        "cold_ttft_s": round(cold.ttft_s, 4),
        "warm_ttft_s": round(warm.ttft_s, 4),
        "output_tokens": cold.output_tokens,
        "phases": phases,
        "phase_coverage": round(record["coverage"], 4),
        "trace_id": cold.trace_id,
    }


def _chat(options: SystemOptions, key_file: Path, clock: Clock) -> Chat:
    with OpenAI(
        base_url=options.url + "/v1", api_key=key_file.read_text().strip(), timeout=CHAT_DEADLINE_S, max_retries=0
    ) as client:
        began_s = clock.monotonic_s()
        with client.chat.completions.with_streaming_response.create(
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
        raise DeadlineExceeded(f"{DEMO_MODEL} answered without a single token")
    return Chat(text=text, ttft_s=first_s - began_s, output_tokens=tokens, trace_id=trace_id)


def _cold_start_of(admin: AdminClient, trace_id: str, clock: Clock) -> dict[str, Any]:
    """The finished record; the last phases reach it a moment after the first token."""
    deadline_s = clock.monotonic_s() + RECORD_DEADLINE_S
    while clock.monotonic_s() < deadline_s:
        record: dict[str, Any] = {"status": "open", "phases": []}
        # Its rows are written a moment after the answer.
        with contextlib.suppress(NotFound):
            record = next(iter(admin.get(f"/traces/{trace_id}")["cold_starts"]), record)
        if record["status"] == "done" and any(bar.name == "prefill" for bar in bars_of(record["phases"])):
            return record
        asyncio.run(pause(0.1))
    raise DeadlineExceeded(f"no finished cold start belongs to trace {trace_id}; see `pilotlight logs scheduler`")


def _forget_demo_model(admin: AdminClient) -> None:
    try:
        admin.delete(f"/models/{DEMO_MODEL}")
    except NotFound:
        return
