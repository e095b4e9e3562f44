"""How long the parts of a build take on this machine's GPU: a line of JSON (MEDUSA's Figure 9).

``python medusa_offline.py SHAPE FOLDER``: a worker's engine children build the artifact of a model
with random weights, as ``worker.build_steps`` has them do it, with graphs and compiled kernels.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from engine_gpu_weights import DEVIATION, spec_of

from pilotlight.common.clock import SystemClock
from pilotlight.common.messages.artifacts import ClaimedBuild
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.graphs import GraphWays
from pilotlight.common.messages.pool import PartReady, TensorPlace
from pilotlight.common.nvml import list_gpus
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import Digest, ModelName, WorkerId
from pilotlight.policy.materialized import Artifact, Fingerprint
from pilotlight.policy.model import Dtype, Model, ModelSpec, ScalingBounds, Slo
from pilotlight.worker.build_session import BuildSession
from pilotlight.worker.build_steps import build
from pilotlight.worker.engines.child_command import ChildOptions
from pilotlight.worker.engines.process import ProcessEngine

ALIGNMENT = 4096
BUILD_S = 300.0
Told = dict[str, Any]


class Source:
    """Leases parts that all lie in one file: one tensor's bytes serve all."""

    intact = True

    def __init__(self, spec: ModelSpec, path: Path) -> None:
        decoder = decoder_of(spec)
        self.pool_path = str(path)
        self._parts: dict[int, tuple[TensorPlace, ...]] = {}
        longest = 0
        for part in range(spec.num_layers + 2):
            places = [
                TensorPlace(
                    name=decoder.stored_name(part, name),
                    dtype=Dtype.BFLOAT16,
                    shape=shape,
                    offset=ALIGNMENT,
                    size_bytes=2 * torch.Size(shape).numel(),
                )
                for name, shape in decoder.stored_shapes(part).items()
            ]
            self._parts[part] = tuple(places)
            longest = max(longest, *(place.size_bytes for place in places))
        generator = torch.Generator().manual_seed(5)
        values = torch.randn(-(-longest // 2), generator=generator).mul_(DEVIATION).bfloat16()
        rounding = bytes(-longest % ALIGNMENT)
        with path.open("wb") as file:
            file.write(bytes(ALIGNMENT))
            file.write(values.view(torch.uint8).numpy().tobytes())
            file.write(rounding)

    async def lease(self, *arguments: Any, **more: Any) -> "Source":
        """See ``PartSource``."""
        return self

    async def __aenter__(self) -> "Source":
        return self

    async def __aexit__(self, *exception: object) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[PartReady]:
        for part, tensors in self._parts.items():
            yield PartReady(part=part, tensors=tensors)


def model_of(shape: str) -> Model:
    """As it would be registered."""
    return Model(
        name=ModelName(shape),
        uri=f"file:///models/{shape}",
        revision=None,
        source_version="1",
        digest=Digest("a" * 64),
        text_digest=Digest("b" * 64),
        dtype=Dtype.BFLOAT16,
        spec=spec_of(shape),
        slo=Slo(ttft_ms=1000.0, tpot_ms=100.0),
        scaling=ScalingBounds(),
    )


class Parts:
    """Seconds of each step of a build."""

    def __init__(self) -> None:
        self._began: list[tuple[str, float]] = []

    async def told(self, step: str, share: float) -> None:
        """A step begins. One that begins again is another try."""
        self._began.append((step, time.perf_counter()))

    def seconds(self) -> Told:
        """By step, and of all, at its end."""
        ends = [*(at_s for _, at_s in self._began[1:]), time.perf_counter()]
        told: Told = {}
        for (step, began_s), end_s in zip(self._began, ends, strict=True):
            told[f"{step}_s"] = told.get(f"{step}_s", 0.0) + end_s - began_s
        tries = sum(step == "validate" for step, _ in self._began)
        return {**told, "total_s": ends[-1] - self._began[0][1], "tries": tries}


def main() -> None:
    """Builds one."""
    shape, folder = sys.argv[1], Path(sys.argv[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    model = model_of(shape)
    pool = Path("/dev/shm") / f"pilotlight-medusa-{os.getpid()}"
    try:
        options = options_of(folder / f"{shape}.build.log")
        told = asyncio.run(measure(model, Source(model.spec, pool), options))
    finally:
        pool.unlink(missing_ok=True)
    print(json.dumps(told))


def options_of(log_path: Path) -> ChildOptions:
    """Engines on the GPU that this process is shown."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    gpu = shown or list_gpus()[0].uuid
    return ChildOptions(threads=2, log_path=log_path, device=DeviceKind.CUDA, cuda_devices=(gpu,))


async def measure(model: Model, source: Any, options: ChildOptions) -> Told:
    """What the parts of its build take, in engines by these options."""

    def make(
        *, record_images: bool = False, note_kernels: bool = False, witness: bool = False
    ) -> BuildSession:
        each = replace(
            options, record_images=record_images, note_kernels=note_kernels, witness=witness
        )
        return BuildSession(ProcessEngine(each), source, WorkerId("bench"), SystemClock())

    session = make()
    environment = (await session.start()).environment
    await session.close()
    assert environment is not None
    fingerprint = Fingerprint.of(environment, model)
    claimed = ClaimedBuild(model=model, fingerprint=fingerprint, attempt=1, lease_s=60.0)
    parts = Parts()
    async with asyncio.timeout(BUILD_S):
        made = await build(claimed, make, parts.told, GraphWays())
    told = parts.seconds()
    artifact = decode_json(made.manifest, Artifact)
    layout = artifact.graphs
    return {
        **told,
        "bytes": len(made.manifest) + sum(map(len, made.archives.values())),
        "steps": len(layout.trials) if layout is not None else 0,
        "prompts": len(layout.prompts) if layout is not None else 0,
        "graphs_refused": artifact.graphs_refused,
        "prompts_refused": layout.prompts_refused if layout is not None else "",
        "compiled_refused": artifact.compiled_refused,
    }


if __name__ == "__main__":
    main()
