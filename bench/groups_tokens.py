"""Tokens over time of one long request with and without scaling down (ParaServe, Fig. 13).

Two systems on this machine, as ``groups`` starts them: the model is loaded nowhere, several nodes
share its start, and one request asks for many tokens. In the first system the group becomes one
worker while it answers; in the second each worker keeps its layers (``PILOTLIGHT_CONSOLIDATE``).

The last line is ``RESULT`` and JSON: for each, how many tokens had come by each second, when the
first and the last one came, the longest pause between two, and whether both said the same. The
workers are CPU workers of one machine: stages of a pipeline compete for its cores.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from cold_start import machine
from groups import MODEL, PROMPT, SETTINGS, SLO, write_model
from openai import OpenAI

from pilotlight.cli.client import AdminClient
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.common.clock import Clock, SystemClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One answer."""

    text: str
    at_s: tuple[float, ...]
    """When each piece came, from the request on."""


def curve_of(at_s: Sequence[float]) -> dict[str, Any]:
    """The figures of one stream: tokens by the end of each second, first, last, longest pause."""
    seconds = range(1, int(at_s[-1]) + 2)
    return {
        "tokens_by_s": [sum(1 for one in at_s if one <= second) for second in seconds],
        "first_s": round(at_s[0], 3),
        "last_s": round(at_s[-1], 3),
        "longest_pause_s": round(max((b - a for a, b in pairwise(at_s)), default=0.0), 3),
    }


def ask(options: SystemOptions, home: Home, tokens: int, clock: Clock) -> Stream:
    """One request; each event carries a token."""
    key = home.api_key.read_text().strip()
    with OpenAI(base_url=f"{options.url}/v1", api_key=key, max_retries=0, timeout=600) as client:
        client.models.list()
        began_s = clock.monotonic_s()
        text, at_s = "", list[float]()
        for chunk in client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            temperature=0,
            max_tokens=tokens,
            stream=True,
            logprobs=0,
            extra_body={"ignore_eos": True},
        ):
            for choice in chunk.choices:
                text += choice.text
                given = choice.logprobs.tokens if choice.logprobs else None
                at_s += [clock.monotonic_s() - began_s] * len(given or ())
    return Stream(text=text, at_s=tuple(at_s))


async def stream_of(
    home: Home, folder: Path, options: SystemOptions, tokens: int, *, consolidate: bool
) -> tuple[Stream, int]:
    """The answer of a fresh system, and with how many stages the start began.

    Args:
        home: Its state.
        folder: The model.
        options: Of the system.
        tokens: Length of the answer.
        consolidate: The group becomes one worker.
    """
    os.environ.update(
        SETTINGS,
        PILOTLIGHT_MAX_STAGES=str(options.nodes),
        PILOTLIGHT_CONSOLIDATE=str(consolidate).lower(),
    )
    async with System(home, options, lambda what: print(f"… {what}", file=sys.stderr)):
        with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
            body = {"name": MODEL, "uri": folder.as_uri(), "slo": SLO, "dtype": "float32"}
            await asyncio.to_thread(admin.post, "/models", body)
            stream = await asyncio.to_thread(ask, options, home, tokens, SystemClock())
            decisions = (await asyncio.to_thread(admin.get, "/decisions"))["decisions"]
            (start,) = [one for one in decisions if one["kind"] == "cold_start"]
            return stream, len(start["outcome"]["scheme"]["placements"])


async def measure(root: Path, stages: int, link: str, layers: int, tokens: int) -> dict[str, Any]:
    """Both streams.

    Args:
        root: For the model and systems.
        stages: Of the group.
        link: Of each node.
        layers: Of the model.
        tokens: Length of the answers.
    """
    folder = root / "model"
    model_bytes = await asyncio.to_thread(write_model, folder, layers)
    found: dict[str, Any] = {}
    texts: set[str] = set()
    for name, consolidate in (("scaled_down", True), ("kept", False)):
        options = SystemOptions(
            port=free_port(),
            nodes=stages,
            link=link,
            pool_bytes=model_bytes * 5 // 4 + (64 << 20),
            model_roots=(folder,),
        )
        home = Home(root / f"home-{name}")
        stream, size = await stream_of(home, folder, options, tokens, consolidate=consolidate)
        if (size, len(stream.at_s)) != (stages, tokens):
            raise SystemExit(f"{size} stages gave {len(stream.at_s)} tokens")
        found[name] = curve_of(stream.at_s)
        texts.add(stream.text)
        shutil.rmtree(home.root, ignore_errors=True)
    return {
        **found,
        "tokens_equal": len(texts) == 1,
        "stages": stages,
        "tokens": tokens,
        "model_bytes": model_bytes,
        "link": link,
        "machine": machine(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Tokens over time, with and without scaling down.")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotlight-groups-") as name:
        root = Path(name)
        # PostgreSQL runs as another user when we are root, and passes through.
        root.chmod(0o711)
        result = asyncio.run(
            measure(root, arguments.stages, arguments.link, arguments.layers, arguments.tokens)
        )
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
