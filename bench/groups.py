"""A cold start that several nodes share, beside one that a single node has: ``make demo-groups``.

For each number of stages a system of its own on this machine, with as many nodes as the largest
group, each behind a link of its own (``PILOTLIGHT_LINK``, no root is needed). Each answers one
request with a model of random weights, in which the embedding is a small part, and which is loaded
nowhere. The group becomes one worker while it answers.

Prints the waterfalls. The last line is ``RESULT`` and JSON: the time to the first token for each
number of stages, their ratio, whether every group became one worker, and whether all said the same.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cold_start import machine, record_of
from openai import OpenAI
from rich.console import Console

from pilotlight.cli.client import AdminClient
from pilotlight.cli.demo_model import demo_model_folder
from pilotlight.cli.home import Home
from pilotlight.cli.plan import SystemOptions
from pilotlight.cli.system import System, free_port
from pilotlight.cli.waterfall import draw
from pilotlight.common.clock import Clock, SystemClock
from pilotlight.common.waiting import pause

MODEL = "wide"
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 1024, 2816, 16, 4, 64
PROMPT = "Once upon a time there was"
SLO = {"ttft_ms": 1000.0, "tpot_ms": 5000.0}
"""No start meets it: of all that are allowed, the soonest is chosen."""
TRIES = 600
SETTINGS = {
    "PILOTLIGHT_THREADS": "1",
    "PILOTLIGHT_SPARE_ENGINE": "false",
    "PILOTLIGHT_DEVICE_BYTES": str(1 << 30),
}
WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one system gave."""

    text: str
    ttft_s: float
    stages: int
    consolidated: bool
    record: dict[str, Any]


def write_model(folder: Path, layers: int) -> int:
    """A checkpoint of random weights with the demo model's tokenizer; bytes of its parameters."""
    shutil.copytree(demo_model_folder(), folder, copy_function=shutil.copy)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    header: dict[str, Any] = {}
    size_bytes = 0
    for name, shape in shapes.items():
        end_bytes = size_bytes + 2 * int(np.prod(shape))
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [size_bytes, end_bytes],
        }
        size_bytes = end_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(17)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            values = (
                np.ones(shape, np.float32)
                if len(shape) == 1
                else rng.standard_normal(shape, np.float32) * np.float32(0.05)
            )
            # The upper half of a float32 is the bfloat16 below it.
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return size_bytes


def ask(options: SystemOptions, home: Home, tokens: int, clock: Clock) -> tuple[str, float, str]:
    """The text, seconds to the first token, and the trace."""
    key = home.api_key.read_text().strip()
    with OpenAI(base_url=f"{options.url}/v1", api_key=key, max_retries=0, timeout=600) as client:
        client.models.list()
        began_s = clock.monotonic_s()
        with client.completions.with_streaming_response.create(
            model=MODEL,
            prompt=PROMPT,
            temperature=0,
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as response:
            text, first_s = "", None
            for chunk in response.parse():
                if chunk.choices and chunk.choices[0].text:
                    first_s = first_s if first_s is not None else clock.monotonic_s()
                    text += chunk.choices[0].text
            assert first_s is not None, "it answered without a token"
            return text, first_s - began_s, response.headers["x-trace-id"]


async def is_one_worker(admin: AdminClient) -> bool:
    """Whether the model comes to be served by one worker alone."""
    for _ in range(TRIES):
        found = (await asyncio.to_thread(admin.get, "/instances"))["instances"]
        workers = (await asyncio.to_thread(admin.get, "/workers"))["workers"]
        holding = sum(1 for worker in workers if worker["held"])
        if found[0]["state"] == "ready" and holding == 1:
            return len(found[0]["body"]["placements"]) == 1
        await pause(0.1)
    return False


async def answer_of(
    home: Home, folder: Path, stages: int, options: SystemOptions, tokens: int
) -> Answer:
    """Start a system, ask once, look what became of it.

    Args:
        home: Its state.
        folder: The model.
        stages: Workers that may share its start.
        options: Of the system.
        tokens: Length of the answer.
    """
    os.environ.update(SETTINGS, PILOTLIGHT_MAX_STAGES=str(stages))
    async with System(home, options, lambda what: print(f"… {what}", file=sys.stderr)):
        with AdminClient(options.url, home.admin_key.read_text().strip()) as admin:
            body = {"name": MODEL, "uri": folder.as_uri(), "slo": SLO}
            await asyncio.to_thread(admin.post, "/models", body)
            text, ttft_s, trace_id = await asyncio.to_thread(
                ask, options, home, tokens, SystemClock()
            )
            consolidated = await is_one_worker(admin)
            decisions = (await asyncio.to_thread(admin.get, "/decisions"))["decisions"]
            (start,) = [one for one in decisions if one["kind"] == "cold_start"]
            return Answer(
                text=text,
                ttft_s=ttft_s,
                stages=len(start["outcome"]["scheme"]["placements"]),
                consolidated=consolidated,
                record=await record_of(admin, trace_id),
            )


async def measure(
    root: Path, sizes: list[int], link: str, layers: int, tokens: int
) -> dict[str, Any]:
    """One answer for each number of stages.

    Args:
        root: For models and systems.
        sizes: Numbers of stages, 1 first.
        link: Of each node.
        layers: Of the model.
        tokens: Length of the answers.
    """
    folder = root / "model"
    model_bytes = await asyncio.to_thread(write_model, folder, layers)
    pool_bytes = model_bytes * 5 // 4 + (64 << 20)
    console = Console(width=WIDTH)
    answers: dict[int, Answer] = {}
    for size in sizes:
        options = SystemOptions(
            port=free_port(),
            nodes=max(sizes),
            link=link,
            pool_bytes=pool_bytes,
            model_roots=(folder,),
        )
        answer = await answer_of(Home(root / f"home-{size}"), folder, size, options, tokens)
        if answer.stages != size:
            raise SystemExit(f"a start of {size} stages was expected, and had {answer.stages}")
        console.print(
            f"\n{size} of {max(sizes)} nodes bring {model_bytes / 2**20:,.0f} MiB at {link} each"
        )
        console.print(draw(answer.record, WIDTH))
        answers[size] = answer
        shutil.rmtree(root / f"home-{size}", ignore_errors=True)
    alone, widest = answers[sizes[0]], answers[sizes[-1]]
    return {
        **{f"ttft_s{size}_s": round(one.ttft_s, 3) for size, one in answers.items()},
        "ratio": round(alone.ttft_s / widest.ttft_s, 3),
        "consolidated": all(one.consolidated for one in answers.values()),
        "tokens_equal": len({one.text for one in answers.values()}) == 1,
        "coverage": {size: round(one.record["coverage"], 4) for size, one in answers.items()},
        "model_bytes": model_bytes,
        "link": link,
        "machine": machine(),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A cold start that several nodes share.")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--link", default="200mbit")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48)
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
