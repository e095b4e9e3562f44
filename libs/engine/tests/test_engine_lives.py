"""Random lives of two engines that hold the same two models: whatever happens to the others, each
token is that of the request alone.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import pytest
from families import FAMILIES

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.errors import NoRoom
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.request import FinishReason, RequestKey

MAX_TOKENS = 36
LIVES = 4
"""Of each pair of models."""
PREFIX = [(7 * index) % 199 for index in range(40)]
PROMPTS = [
    PREFIX[:5],
    PREFIX[:16],
    PREFIX[:17],
    PREFIX[:32],
    [*PREFIX, 3, 4, 5],
    [*PREFIX[:35], 9],
    [50] * 33,
]
"""Equal beginnings of no block, of one and two, up to the last token; and a prompt that shares
nothing. Windows have 20 tokens."""
CONTROLLED = {
    "temperature": 1.2,
    "top_p": 0.9,
    "top_k": 60,
    "min_p": 0.01,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.4,
    "logit_bias": ((3, 2.0), (50, -4.0)),
    "stop_token_ids": (*range(100, 104), 100_000),
    "min_tokens": 4,
    "seed": 2**63 + 5,
}
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95, "seed": 77}, CONTROLLED]
FEWEST_BLOCKS = 5
"""Hold the longest request, and a block for the next one."""


@pytest.fixture(scope="module")
def alone(driver, checkpoint):
    """alone(kind, prompt, sampling): tokens of a request on an engine of its own, prompt and
    sampling by their index.
    """

    @cache
    def output(kind: str, prompt: int, sampling: int) -> list[int]:
        runs = driver(BatchLimits(prefix_cache=False))
        runs.load(checkpoint(kind))
        runs.add("alone", PROMPTS[prompt], max_tokens=MAX_TOKENS, **SAMPLINGS[sampling])
        return runs.finish()["alone"]

    return output


@dataclass
class Asked:
    """One request, wherever it runs at the moment."""

    model: int
    prompt: int
    sampling: int
    max_tokens: int
    place: int
    cancelled: bool = False

    @property
    def parameters(self) -> dict:
        return {
            "instance": f"model {self.model}",
            "max_tokens": self.max_tokens,
            **SAMPLINGS[self.sampling],
        }


@dataclass
class Fleet:
    """Two engines, and what the gateway would know of the requests on them."""

    places: list
    models: list
    rooms: list = field(default_factory=list)
    asked: dict[str, Asked] = field(default_factory=dict)
    reached: Counter = field(default_factory=Counter)

    def load(self, place: int, model: int, blocks: int) -> None:
        room = self.places[place].load(
            self.models[model], f"model {model}", kv_tokens=BLOCK_TOKENS * blocks
        )
        self.places[place].capacity_tokens = (
            1 << 30
        )  # it changes all the time; ``check`` looks at each instance
        self.rooms = [*self.rooms[:model], room, *self.rooms[model + 1 :]]

    def step(self, place: int) -> None:
        runs = self.places[place]
        if runs.engine.has_work:
            result = runs.step()
            self.reached.update(preempted=result.preemptions, shared=result.prefix_hit_tokens)
        self.check()

    def check(self) -> None:
        for runs in self.places:
            for stage in runs.engine._stages.values():
                stage.scheduler._tables.check()

    def add(self, *facts: int) -> None:
        name, asked = f"r{len(self.asked)}", Asked(*facts)
        self.asked[name] = asked
        self.places[asked.place].add(name, PROMPTS[asked.prompt], **asked.parameters)

    def some(self, chance: random.Random) -> str | None:
        """One of the requests that have not ended."""
        names = [
            name
            for name, asked in self.asked.items()
            if self.places[asked.place].outputs[name].finish is None
        ]
        return chance.choice(names) if names else None

    def cancel(self, name: str) -> None:
        asked = self.asked[name]
        asked.cancelled = True
        self.places[asked.place].engine.abort(RequestId(name), 1)
        self.step(asked.place)
        assert self.places[asked.place].outputs[name].finish is FinishReason.CANCELLED, (
            "obeyed within one step"
        )

    def move(self, name: str, with_kv: bool, torn: int) -> None:
        """To the other engine, with its KV, which may lack its end, or with its tokens alone."""
        asked = self.asked[name]
        source, target = self.places[asked.place], self.places[1 - asked.place]
        model, instance = self.models[asked.model], InstanceId(f"model {asked.model}")
        pieces = (
            source.engine.export_kv(instance, [RequestKey(RequestId(name), 1)], model.spec.whole)
            if with_kv
            else ()
        )
        pieces = [
            piece.cut(model.spec.whole, 0, piece.stop - torn)
            for piece in pieces
            if piece.stop > torn
        ]
        released = source.engine.release(RequestId(name), 1)
        target.outputs[name] = source.outputs.pop(name)
        assert list(released.output_ids) == target.outputs[name].token_ids
        arguments = (
            RequestId(name),
            1,
            instance,
            released.prompt_ids,
            released.output_ids,
            released.sampling,
        )
        try:
            target.engine.add(*arguments, pieces=pieces)
            self.reached["with KV" if pieces else "without KV"] += 1
        except NoRoom:
            target.engine.add(*arguments)
            self.reached["without room"] += 1
        asked.place = 1 - asked.place

    def kill(self, place: int, model: int, blocks: int) -> None:
        """An instance goes with all that is on it, and comes back empty.

        The gateway resumes elsewhere what was in mid-stream.
        """
        runs = self.places[place]
        here = [
            name
            for name, asked in self.asked.items()
            if (asked.place, asked.model) == (place, model)
        ]
        lost = [name for name in here if runs.outputs[name].finish is None]
        runs.engine.drop(InstanceId(f"model {model}"))
        self.load(place, model, blocks)
        self.step(place)
        for name in lost:
            asked, output = self.asked[name], runs.outputs.pop(name)
            assert output.finish is FinishReason.CANCELLED
            asked.place = 1 - place
            self.places[asked.place].add(
                name, PROMPTS[asked.prompt], output.token_ids, **asked.parameters
            )
            self.reached["killed"] += 1

    def resize(self, place: int, model: int, blocks: int) -> None:
        room = self.rooms[model]
        device_bytes = room.parameter_bytes + blocks * BLOCK_TOKENS * room.kv_bytes_per_token
        self.places[place].engine.resize(InstanceId(f"model {model}"), device_bytes)
        self.check()

    def finish(self) -> None:
        """In each step the oldest request of one model runs a token at least: none waits for
        ever.
        """
        for place, runs in enumerate(self.places):
            stages = list(runs.engine._stages.values())
            bound = 1 + sum(
                request.kv_tokens for stage in stages for request in stage.scheduler.requests
            )
            while runs.engine.has_work:
                self.step(place)
                bound -= 1
                assert bound >= 0, "a request starves"
            assert all(
                stage.scheduler.kv_free_tokens == stage.scheduler.kv_capacity_tokens
                for stage in stages
            )
            for model in range(2):
                runs.engine.unload(InstanceId(f"model {model}"))
            assert runs.engine.backed_bytes == 0


DECK = [*["steps"] * 12, *["add"] * 4, *["move"] * 6, *["resize"] * 2, "cancel", "kill"]


def live(fleet: Fleet, chance: random.Random) -> None:
    """Some requests at once, so that there is too little room; then whatever may happen, in any
    order.
    """

    def blocks() -> int:
        return chance.randint(FEWEST_BLOCKS, 6)

    def add() -> None:
        prompt, sampling = chance.randrange(len(PROMPTS)), chance.randrange(len(SAMPLINGS))
        fleet.add(
            int(chance.random() < 0.3),
            prompt,
            sampling,
            chance.randint(8, MAX_TOKENS),
            chance.randrange(2),
        )

    for place, model in itertools.product(range(2), repeat=2):
        fleet.load(place, model, blocks())
    for _ in range(6):
        add()
    for move in chance.sample(DECK, len(DECK)):
        name = fleet.some(chance)
        match move:
            case "steps":
                place = chance.randrange(2)
                for _ in range(chance.randint(1, 10)):
                    fleet.step(place)
            case "add":
                add()
            case "move" if name is not None:
                fleet.move(name, with_kv=chance.random() < 0.9, torn=chance.randrange(4))
            case "resize":
                fleet.resize(chance.randrange(2), chance.randrange(2), blocks())
            case "cancel" if name is not None:
                fleet.cancel(name)
            case "kill" if name is not None:
                fleet.kill(fleet.asked[name].place, fleet.asked[name].model, blocks())
            case _:
                """Every request has ended."""
    fleet.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", list(zip(FAMILIES, [*FAMILIES[1:], "qwen3-moe-tied"], strict=True)), ids="+".join
)
def test_output_depends_on_nothing_but_the_request(kinds, driver, checkpoint, alone):
    """Seeds instead of hypothesis: of the lives that it generates, most are too short for a request
    to be preempted or moved.
    """
    reached = Counter()
    for seed in range(LIVES):
        chance = random.Random(f"{kinds} {seed}")
        step_tokens = chance.choice((2, 7, 16, 50))
        limits = BatchLimits(
            step_tokens=step_tokens, running=min(step_tokens, 5), prefix_cache=chance.random() < 0.7
        )
        fleet = Fleet([driver(limits), driver(BatchLimits())], [checkpoint(kind) for kind in kinds])
        live(fleet, chance)
        for name, asked in fleet.asked.items():
            output = fleet.places[asked.place].outputs[name]
            expected = alone(kinds[asked.model], asked.prompt, asked.sampling)[: asked.max_tokens]
            if asked.cancelled:
                assert output.token_ids == expected[: len(output.token_ids)], f"life {seed}, {name}"
            else:
                assert output.token_ids == expected, f"life {seed}, {name}"
                stopped = len(expected) < asked.max_tokens
                assert output.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        reached.update(fleet.reached)
    assert (
        min(reached[what] for what in ("preempted", "shared", "with KV", "without KV", "killed"))
        > 0
    ), f"the lives reach what they are to test: {reached}"
