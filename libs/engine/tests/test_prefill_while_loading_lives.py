"""Random lives of an engine with a model whose parts are still coming: tokens are those of a loaded
model.
"""

from dataclasses import replace
from functools import cache

from coming_parts import KV_TOKENS, MAX_TOKENS, PARTS, PROMPTS, I, begin, device_bytes, place
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.core.limits import BatchLimits
from pilotlight.engine.engine import Engine
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import FinishReason, RequestKey, Sampling


@cache
def alone(driver, checkpoint, kind: str, prompt: int) -> list[int]:
    """What a loaded model says, alone on its engine."""
    runs = driver()
    runs.load(checkpoint(kind), kv_tokens=KV_TOKENS)
    runs.add("alone", PROMPTS[prompt], max_tokens=MAX_TOKENS)
    return runs.finish()["alone"]


MOVES = st.one_of(
    st.tuples(st.just("part"), st.integers(0, PARTS - 1)),
    st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.just("abort"), st.integers(0, 7)),
    st.tuples(st.just("other"), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.just("resize"), st.integers(8, 64)),
    st.tuples(st.just("moved in"), st.integers(0, len(PROMPTS) - 1)),
    st.tuples(st.just("step"), st.integers(1, 3)),
)
KINDS = {"i": "qwen3-moe", "other": "llama"}


class Life:
    """One engine with a model that is loaded, and one whose parts come in any order, while requests
    come and go.
    """

    def __init__(self, driver, checkpoint, step_tokens: int, *, prefix_cache: bool) -> None:
        limits = BatchLimits(
            step_tokens=step_tokens, running=min(4, step_tokens), prefix_cache=prefix_cache
        )
        self.driver, self.runs = driver, driver(limits)
        self.models = {instance: checkpoint(kind) for instance, kind in KINDS.items()}
        begin(self.runs, self.models["i"])
        self.runs.load(self.models["other"], "other", kv_tokens=KV_TOKENS)
        self.runs.capacity_tokens = 1 << 30
        self.asked: dict[str, tuple[str, int]] = {}

    @property
    def engine(self) -> Engine:
        return self.runs.engine

    def take(self, what: str, number: int) -> None:
        match what:
            case "part":
                place(self.runs, self.models["i"], number)
            case "add" | "other":
                self.add("i" if what == "add" else "other", number)
            case "abort" if number < len(self.asked):
                name = list(self.asked)[number]
                self.engine.abort(RequestId(name), 1)
                self.step()
                assert self.runs.outputs[name].finish is not None, "obeyed within a step"
            case "resize":
                self.engine.resize(I, device_bytes(self.models["i"], number))
            case "moved in" if self.engine._stages[I].complete:
                self.move_in(number)
            case "step":
                for _ in range(number):
                    self.step()
            case _:
                """There is no request yet, or it is too early."""
        self.check()

    def add(self, instance: str, prompt: int) -> None:
        name = str(len(self.asked))
        self.asked[name] = instance, prompt
        self.runs.add(name, PROMPTS[prompt], instance=instance, max_tokens=MAX_TOKENS)

    def move_in(self, prompt: int) -> None:
        """A request that ran elsewhere takes blocks at once, maybe those of one that has just left
        the batch under way.
        """
        source = self.driver()
        source.load(self.models["i"])
        source.add("moves", PROMPTS[prompt], max_tokens=MAX_TOKENS)
        source.step()
        pieces = source.engine.export_kv(
            I, [RequestKey(RequestId("moves"), 1)], self.models["i"].spec.whole
        )
        name = str(len(self.asked))
        pieces = [replace(piece, key=RequestKey(RequestId(name), 1)) for piece in pieces]
        output_ids = source.outputs["moves"].token_ids
        if (
            self.engine._stages[I].scheduler.running < 4
            and self.engine._stages[I].scheduler.kv_free_tokens >= 16 * 8
        ):
            self.asked[name] = "i", prompt
            sampling = Sampling(seed=0, max_tokens=MAX_TOKENS, temperature=0.0)
            self.engine.add(
                RequestId(name), 1, I, PROMPTS[prompt], output_ids, sampling, pieces=pieces
            )
            self.runs.outputs[name] = type(source.outputs["moves"])(list(output_ids))

    def step(self) -> None:
        if self.engine.has_work:
            self.runs.step()

    def check(self) -> None:
        for stage in self.engine._stages.values():
            stage.scheduler._tables.check()


@settings(deadline=None, max_examples=60)
@given(
    moves=st.lists(MOVES, min_size=6, max_size=40),
    step_tokens=st.sampled_from((7, 16, 64)),
    prefix_cache=st.booleans(),
)
def test_tokens_do_not_depend_on_when_parts_come(
    driver, checkpoint, moves, step_tokens, prefix_cache
):
    life = Life(driver, checkpoint, step_tokens, prefix_cache=prefix_cache)
    for what, number in moves:
        life.take(what, number)
    place(life.runs, life.models["i"], *range(PARTS))
    while life.engine.has_work:
        life.step()
    for name, (instance, prompt) in life.asked.items():
        output = life.runs.outputs[name]
        expected = alone(driver, checkpoint, KINDS[instance], prompt)
        whole = output.finish is FinishReason.LENGTH
        assert output.token_ids == (expected if whole else expected[: len(output.token_ids)])
        assert whole or output.finish is FinishReason.CANCELLED
