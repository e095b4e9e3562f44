"""KV on loan goes back on one GPU: ``make bench-kv-return``, a line of JSON for each return.

A small model with the KV of one of 4B parameters has 24 or 100 GB of KV, the rest of the device is
full, and 16 requests run. Then another model needs the memory. Timed is the order (``shrunk_ms``:
from then on the newcomer may take it), what of it went where, the newcomer's own ``back``, and the
steps of the requests, before and while the arena's thread works. Three ways, by turns on one
arena, after a return that is not counted (it compiles kernels and captures steps):

- ``kept``: what the engine does. Memory becomes idle without a call of the driver, and the newcomer
  maps it; a thread unmaps where it was.
- ``behind``: the same, and the thread gives all of it back to the driver; the newcomer creates.
- ``at_once``: unmapped and released before anything else happens.

A return that fails has its line too, with ``failed``, and so has one that there was no time for,
with ``left_out``; either makes the exit status 1.
"""

import argparse
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from pilotlight.engine.core.extents import Extent
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.device.copying import Source
from pilotlight.engine.engine import Engine
from pilotlight.engine.errors import EngineError
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.model import Dtype, ModelSpec
from pilotlight.policy.request import FinishReason, Sampling

INSTANCE = InstanceId("i")
BARE = ModelSpec(
    architecture="LlamaForCausalLM",
    dtype=Dtype.FLOAT32,
    num_layers=36,
    hidden_size=192,
    intermediate_size=320,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=997,
    max_context_tokens=4096,
    rope_theta=1e4,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    tied_embeddings=False,
    attention_bias=False,
    part_bytes=(0,) * 38,
)
DECODER = decoder_of(BARE)
SPEC = replace(
    BARE,
    part_bytes=tuple(
        4 * sum(math.prod(shape) for shape in DECODER.shapes(part).values()) for part in range(38)
    ),
)
TOKEN_BYTES = SPEC.kv_bytes_per_token(SPEC.whole, Dtype.FLOAT32)
GRANULE_BYTES = 2 << 20
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 400, 90
GRANTED_TOKENS, LEFT_TOKENS = 2048, 4096
WAYS = ("kept", "behind", "at_once")
ROUNDS, SECONDS = 3, 90.0
STEPS = 15
"""Before and after the return."""
RESERVE_BYTES = 5 << 30
"""Of the device, for torch and the driver, as an engine's child declares it."""


@dataclass(frozen=True)
class Case:
    """A return."""

    name: str
    lent_tokens: int
    left_tokens: int
    parts: int
    """Of the newcomer."""
    part_bytes: int


CASES = (
    Case("24 GB, requests lose blocks", int(24e9) // TOKEN_BYTES, LEFT_TOKENS, 36, 400 << 20),
    Case("100 GB, requests lose blocks", int(100e9) // TOKEN_BYTES, LEFT_TOKENS, 80, 800 << 20),
    Case("50 of 100 GB", int(100e9) // TOKEN_BYTES, int(50e9) // TOKEN_BYTES, 64, 700 << 20),
)


class BenchArena(CudaArena):
    """Keeps idle memory as one of the ways has it: ``way``, which may change between returns."""

    way, returning = WAYS[0], False

    @property
    def most_idle_bytes(self) -> int:
        """See ``CudaArena``."""
        keeps = self.way == "kept" or (self.way == "behind" and self.returning)
        return super().most_idle_bytes if keeps else 0

    def give_back(self, work: Callable[[], object]) -> None:
        """Does what gives memory back."""
        self.returning = True
        work()
        self.returning = False
        self.native_arena.keep(self.most_idle_bytes)


def size_of(kv_tokens: int) -> int:
    """Bytes of the stage with KV for so many tokens."""
    granules = (SPEC.num_layers * 3 + 2) * GRANULE_BYTES
    return SPEC.total_bytes + granules + kv_tokens * TOKEN_BYTES


def random_part(part: int, generator: torch.Generator) -> dict[str, Source]:
    """A part's tensors, as a loader offers them."""
    sources: dict[str, Source] = {}
    for name, shape in DECODER.shapes(part).items():
        value = torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)
        view = memoryview(value.view(-1).view(torch.uint8).numpy())
        sources[DECODER.prefix(part) + name] = (Dtype.FLOAT32, shape, view)
    return sources


class Served:
    """One engine with the model."""

    def __init__(self, arena: CudaArena) -> None:
        ticks = itertools.count()
        limits = BatchLimits(step_tokens=2048, running=32, prefix_cache=False)
        self.engine = Engine(2, lambda: next(ticks) / 1000, limits, arena)
        whole, given = SPEC.whole, size_of(GRANTED_TOKENS)
        self.engine.begin_load(INSTANCE, SPEC, whole, Dtype.FLOAT32, given)
        generator = torch.Generator().manual_seed(3)
        for part in range(SPEC.num_layers + 2):
            self.engine.place_part(INSTANCE, part, random_part(part, generator))
        self._tokens: dict[str, list[int]] = {}
        self._run = 0
        self.expected = self.run()

    def begin(self) -> None:
        """The same requests each time."""
        self._run += 1
        self._tokens = {f"{self._run} {number}": [] for number in range(REQUESTS)}
        for number, name in enumerate(self._tokens):
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randint(997, (PROMPT_TOKENS,), generator=generator)
            prompt = [int(token) for token in drawn]
            sampling = Sampling(seed=number, max_tokens=OUTPUT_TOKENS, temperature=0.0)
            self.engine.add(RequestId(name), 1, INSTANCE, prompt, (), sampling)

    def step(self) -> None:
        """One, and what it gave."""
        for produced in self.engine.step().produced:
            if produced.finish is FinishReason.ERROR:
                raise SystemExit(f"{produced.request_id}: {produced.message}")
            self._tokens[produced.request_id].extend(produced.token_ids)

    def finish(self) -> list[list[int]]:
        """The tokens of all requests."""
        while self.engine.has_work:
            self.step()
        return list(self._tokens.values())

    def drain(self) -> None:
        """No request is left, whatever became of them."""
        for number in range(REQUESTS):
            self.engine.abort(RequestId(f"{self._run} {number}"), 1)
        while self.engine.has_work:
            self.engine.step()

    def run(self) -> list[list[int]]:
        """All requests from the first token to the last."""
        self.begin()
        return self.finish()

    def resize(self, kv_tokens: int, *, must: bool = False) -> None:
        """The model has so much KV from now on."""
        self.engine.resize(INSTANCE, size_of(kv_tokens), must=must)


def timed_ms(work: Callable[[], object]) -> float:
    """By the host's clock."""
    begun_s = time.perf_counter()
    work()
    return round((time.perf_counter() - begun_s) * 1000, 2)


def phases(arena: CudaArena, work: Callable[[], object]) -> dict[str, Any]:
    """What something took, and what of it the driver."""
    before = asdict(arena.driver_calls)
    all_ms = timed_ms(work)
    calls = {name: count - before[name] for name, count in asdict(arena.driver_calls).items()}
    spent = {name: calls.pop(name) / 1e6 for name in list(calls) if name.endswith("_ns")}
    own_ms = all_ms - sum(spent.values()) + spent["behind_ns"]
    of_driver = {name.replace("_ns", "_ms"): round(ms, 2) for name, ms in spent.items() if ms}
    called = {name: count for name, count in calls.items() if count}
    return {"ms": all_ms, **of_driver, "python_and_moves_ms": round(own_ms, 2), "calls": called}


def returned(arena: BenchArena, served: Served, case: Case) -> dict[str, Any]:
    """One return, and what came of it. No memory is idle when it begins.

    Raises:
        EngineError: there was no room, or the device refused.
    """
    arena.native_arena.settle(0)
    ballast, newcomer = arena.open_slot(), arena.open_slot()
    try:
        grown_ms = timed_ms(lambda: served.resize(case.lent_tokens))
        free_bytes = arena.capacity_bytes - arena.backed_bytes
        ballast.back(Extent(0, free_bytes // GRANULE_BYTES * GRANULE_BYTES))
        served.begin()
        before_ms = [timed_ms(served.step) for _ in range(STEPS)]
        behind_ns = arena.driver_calls.behind_ns
        order = partial(served.resize, case.left_tokens, must=True)
        shrunk = phases(arena, lambda: arena.give_back(order))
        places = [Extent(n * case.part_bytes, (n + 1) * case.part_bytes) for n in range(case.parts)]
        loaded = phases(arena, lambda: [newcomer.back(place) for place in places])
        after_ms = [timed_ms(served.step) for _ in range(STEPS)]
        behind_ms = (arena.driver_calls.behind_ns - behind_ns) / 1e6
        same = served.finish() == served.expected
    finally:
        newcomer.close()
        ballast.close()
        served.drain()
        served.resize(GRANTED_TOKENS)
    return {
        "shrunk": shrunk,
        "newcomer": loaded | {"gib": round(case.parts * case.part_bytes / 2**30, 1)},
        "step_ms": round(statistics.median(before_ms[3:]), 2),
        "steps_after_ms": [round(ms, 1) for ms in after_ms],
        "behind_ms": round(behind_ms, 1),
        "grown_ms": grown_ms,
        "same_tokens": same,
    }


def measured(
    arena: BenchArena, served: Served, cases: Sequence[Case], rounds: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """All cases of all ways by turns, and that one was left out where there is no time for it.

    Args:
        arena: of the device.
        served: on it.
        cases: the returns.
        rounds: of all of them, in each way.
        seconds: no other return begins later.
    """
    returned(arena, served, cases[0])
    until_s = time.perf_counter() + seconds
    for number, case, way in itertools.product(range(rounds), cases, WAYS):
        line: dict[str, Any] = {"way": way, "round": number, "case": case.name}
        if time.perf_counter() > until_s:
            yield line | {"left_out": f"{seconds:g} s are over"}
            continue
        arena.way = way
        try:
            line |= returned(arena, served, case)
        except EngineError as error:
            line["failed"] = f"{type(error).__name__}: {error}"
        yield line


def summary(found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each case and way the medians, and the worst."""
    for case, way in sorted({(each["case"], each["way"]) for each in found}):
        all_of_it = [each for each in found if (each["case"], each["way"]) == (case, way)]
        these = [each for each in all_of_it if "shrunk" in each]
        counts = {"case": case, "way": way, "returns": len(these), "wanted": len(all_of_it)}
        if not these:
            yield counts
            continue
        shrunk_ms = [each["shrunk"]["ms"] for each in these]
        yield counts | {
            "shrunk_ms": [statistics.median(shrunk_ms), max(shrunk_ms)],
            "newcomer_ms": statistics.median(each["newcomer"]["ms"] for each in these),
            "worst_step_after_ms": max(max(each["steps_after_ms"]) for each in these),
            "step_ms": statistics.median(each["step_ms"] for each in these),
            "same_tokens": all(each["same_tokens"] for each in these),
        }


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all that is counted")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    torch.cuda.init()
    arena = BenchArena()
    arena.capacity_bytes -= RESERVE_BYTES
    served = Served(arena)
    found: list[dict[str, Any]] = []
    for each in measured(arena, served, CASES, arguments.rounds, arguments.seconds):
        found.append(each)
        print(json.dumps(each), flush=True)
    for line in summary(found):
        print(json.dumps(line), flush=True)
    served.engine.unload(INSTANCE)
    gc.collect()
    arena.close()
    if not all(each.get("same_tokens") for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
