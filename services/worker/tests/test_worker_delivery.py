"""What steps that are heard together gave is worked on together: to the same end as one by one."""

from collections.abc import Sequence

from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from pilotlight.common.errors import InternalError
from pilotlight.common.messages.engine import Produced
from pilotlight.common.messages.prompts import PromptLogprobs
from pilotlight.common.messages.tokens import Submit, TokenEntry
from pilotlight.policy.ids import GatewayId, InstanceId, ModelName, RequestId
from pilotlight.policy.phase import Moment
from pilotlight.policy.request import FinishReason, RequestKey, Sampling
from pilotlight.worker.delivery import joined
from pilotlight.worker.requests import RequestTable

NAMES = ("req-1", "req-2", "req-3")
EARLIER = {"req-1": 0, "req-2": 4, "req-3": 0}
"""Output that each came with."""
LOGPROBS = "req-3"
"""It asked for them; engines do not know all."""

Given = Sequence[tuple[tuple[Produced, ...], Moment | None]]


def table() -> RequestTable:
    made = RequestTable(8)
    for name in NAMES:
        made.accept(
            Submit(
                request_id=RequestId(name),
                attempt=1,
                gateway_id=GatewayId("gw-1"),
                instance_id=InstanceId("inst-1"),
                model=ModelName("m"),
                prompt_ids=[1, 2],
                output_ids=[9] * EARLIER[name],
                sampling=Sampling(seed=1, max_tokens=100, logprobs=name == LOGPROBS),
            )
        )
    return made


FATES = st.sampled_from((*["goes on"] * 12, "ends", "is wrong", "ends wrong"))
STEPS = st.lists(
    st.dictionaries(
        st.sampled_from(NAMES), st.tuples(st.integers(0, 2), FATES, st.booleans()), max_size=3
    ),
    min_size=1,
    max_size=10,
)
"""What an engine may say, and what it may not: positions that are skipped, more after an end."""


def said(steps: Sequence[dict[str, tuple[int, str, bool]]]) -> Given:
    at = dict(EARLIER)
    given: list[tuple[tuple[Produced, ...], Moment | None]] = []
    for number, step in enumerate(steps):
        produced: list[Produced] = []
        for name, (count, fate, known) in step.items():
            token_ids = tuple(range(at[name], at[name] + count))
            first = at[name] == EARLIER[name] and count > 0
            ends = fate.startswith("ends")
            produced.append(
                Produced(
                    request_id=RequestId(name),
                    attempt=1,
                    position=at[name] + fate.endswith("wrong"),
                    token_ids=token_ids,
                    logprobs=tuple(map(float, token_ids)) if known and name == LOGPROBS else None,
                    finish=FinishReason.LENGTH if ends else None,
                    code="code" if ends else "",
                    message="message" if ends else "",
                    cached_tokens=7 if first else 0,
                    prompt=PromptLogprobs(logprobs=(-1.0,), ranks=(1,)) if first else None,
                    vector=b"1234" if first else None,
                )
            )
            at[name] += count
        given.append((tuple(produced), Moment(at_s=float(number), wall_offset_s=0.0)))
    return given


def entries_of(made: RequestTable) -> list[TokenEntry | None]:
    return [made.entry(RequestKey(RequestId(name), 1), EARLIER[name]) for name in NAMES]


@settings(max_examples=150, deadline=None)
@drawn(STEPS)
def test_joined_steps_come_to_what_they_come_to_one_by_one(
    steps: list[dict[str, tuple[int, str, bool]]],
) -> None:
    given, alone, together = said(steps), table(), table()
    failures: list[str] = []
    firsts: list[list[tuple[str, Moment | None]]] = [[], []]
    one_by_one = (([one], sampled) for produced, sampled in given for one in produced)
    for made, pieces, begun in (
        (alone, one_by_one, firsts[0]),
        (together, joined(given), firsts[1]),
    ):
        failure = ""
        try:
            for (first, *more), sampled in pieces:
                unsent = made.produced(first, 5.0, *more)
                if unsent is not None and unsent.position == 0 and first.token_ids:
                    begun.append((first.request_id, sampled))
        except InternalError as error:
            failure = error.message
        failures.append(failure)
    assert failures[0] == failures[1]
    if failures[0]:
        # What came before is there; of others, perhaps what came later in the same hearing, too.
        for less, more in zip(entries_of(alone), entries_of(together), strict=True):
            had = [] if less is None else less.token_ids
            assert ([] if more is None else more.token_ids)[: len(had)] == had
        return
    assert entries_of(alone) == entries_of(together)
    assert (alone.running, len(alone)) == (together.running, len(together))
    assert firsts[0] == firsts[1], "of first tokens it matters when they were there"


def test_the_tokens_of_many_steps_are_one() -> None:
    moments = [Moment(at_s=float(number), wall_offset_s=0.0) for number in range(3)]
    given = [
        (
            tuple(
                Produced(
                    request_id=RequestId(name),
                    attempt=1,
                    position=number,
                    token_ids=(number,),
                    finish=FinishReason.STOP if number == 2 else None,
                )
                for name in ("req-1", "req-2")
            ),
            moment,
        )
        for number, moment in enumerate(moments)
    ]
    told = list(joined(given))
    assert [([one.position for one in pieces], sampled) for pieces, sampled in told] == [
        ([0, 1, 2], moments[0])
    ] * 2
    assert list(joined(given[:1])) == [([one], moments[0]) for one in given[0][0]]
