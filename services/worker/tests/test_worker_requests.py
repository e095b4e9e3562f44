"""The request table: every token arrives exactly once and in order, whatever is lost, repeated or
late.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.common.errors import BadRequest, Conflict, InternalError, NotFound, QueueFull
from pilotlight.common.messages.engine import Produced
from pilotlight.common.messages.prompts import PromptLogprobs
from pilotlight.common.messages.tokens import AckEntry, Resend, Submit, TokenEntry
from pilotlight.policy.ids import GatewayId, InstanceId, ModelName, RequestId
from pilotlight.policy.request import FinishReason, RequestKey, Sampling
from pilotlight.worker.requests import FINISHED_KEPT_S, KEPT_PER_RUNNING, SILENCE_S, RequestTable

GATEWAY = GatewayId("gw-1")
INSTANCE = InstanceId("inst-1")


def submit(
    request_id: str = "req-1", attempt: int = 1, earlier: int = 0, logprobs: bool = False
) -> Submit:
    return Submit(
        request_id=RequestId(request_id),
        attempt=attempt,
        gateway_id=GATEWAY,
        instance_id=INSTANCE,
        model=ModelName("m"),
        prompt_ids=[1, 2],
        output_ids=list(range(earlier)),
        sampling=Sampling(seed=1, max_tokens=100, logprobs=logprobs),
    )


def produced(
    position: int,
    token_ids: list[int],
    finish: FinishReason | None = None,
    request_id: str = "req-1",
) -> Produced:
    return Produced(
        request_id=RequestId(request_id),
        attempt=1,
        position=position,
        token_ids=tuple(token_ids),
        logprobs=tuple(-float(token) for token in token_ids),
        finish=finish,
    )


def ack(seq: int, done: bool = False, request_id: str = "req-1") -> AckEntry:
    return AckEntry(request_id=RequestId(request_id), attempt=1, seq=seq, done=done)


def ask(from_seq: int) -> Resend:
    return Resend(request_id=RequestId("req-1"), attempt=1, from_seq=from_seq)


class Receiver:
    """A gateway's end, as design.md describes it: takes what follows, drops what it has, asks for
    what is missing.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish: FinishReason | None = None

    @property
    def next(self) -> int:
        return self.first + len(self.token_ids)

    def take(self, entry: TokenEntry) -> None:
        if entry.seq > self.next:
            return
        skip = self.next - entry.seq
        self.token_ids += entry.token_ids[skip:]
        self.logprobs += (entry.logprobs or [])[skip:]
        if entry.finish is not None and entry.seq + len(entry.token_ids) == self.next:
            self.finish = entry.finish


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("ack"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("resend"), st.integers(0, 3), st.booleans()),
    ),
    max_size=60,
)


@given(steps=STEPS, earlier=st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_any_interleaving_delivers_every_token_once_in_order(
    steps: list[tuple[str, int, bool]], earlier: int
) -> None:
    table = RequestTable(8)
    table.accept(submit(earlier=earlier, logprobs=True))
    receiver = Receiver(earlier)
    made: list[int] = []
    for what, number, lost in steps:
        if what == "produce":
            fresh = [1000 + len(made) + index for index in range(number)]
            unsent = table.produced(produced(earlier + len(made), fresh), 0.0)
            made += fresh
            assert unsent is not None
            entry = table.entry(unsent.key, unsent.position)
            if not lost and entry is not None:
                receiver.take(entry)
        elif what == "ack":
            # Late acknowledgements say less than what has arrived, never more.
            table.acknowledge(GATEWAY, ack(max(0, receiver.next - number)), 0.0)
        else:
            entry = table.resend(ask(receiver.next))
            if entry is not None and not lost:
                receiver.take(entry)
    last = table.produced(produced(earlier + len(made), [7], FinishReason.STOP), 0.0)
    assert last is not None
    made.append(7)
    entry = table.resend(ask(receiver.next))
    assert entry is not None
    receiver.take(entry)
    receiver.take(entry)
    assert receiver.token_ids == made
    assert receiver.logprobs == [-float(token) for token in made]
    assert receiver.finish is FinishReason.STOP
    assert table.acknowledge(GATEWAY, ack(receiver.next, done=True), 0.0) is None
    assert len(table) == 0
    assert table.running == 0


def test_entry_carries_only_what_the_step_gave() -> None:
    table = RequestTable(8)
    table.accept(submit(earlier=2))
    table.produced(produced(2, [5, 6]), 0.0)
    unsent = table.produced(produced(4, [7]), 0.0)
    assert unsent is not None
    entry = table.entry(unsent.key, unsent.position)
    assert entry is not None
    assert (unsent.gateway_id, entry.seq, entry.token_ids) == (GATEWAY, 4, [7])
    assert entry.logprobs is None


def test_a_repeated_submit_is_known_even_after_the_end() -> None:
    table = RequestTable(8)
    key = RequestKey(RequestId("req-1"), 1)
    assert not table.knows(key)
    table.accept(submit())
    assert table.knows(key)
    table.produced(produced(0, [1], FinishReason.LENGTH), 0.0)
    table.acknowledge(GATEWAY, ack(1, done=True), 0.0)
    assert len(table) == 0
    assert table.knows(key)


def test_a_new_attempt_drops_the_old_one_and_an_older_one_is_refused() -> None:
    table = RequestTable(8)
    table.accept(submit(attempt=1))
    assert table.accept(submit(attempt=2)) == (RequestKey(RequestId("req-1"), 1),)
    assert table.produced(produced(0, [1]), 0.0) is None
    with pytest.raises(Conflict):
        table.accept(submit(attempt=0))


def test_the_table_is_bounded() -> None:
    table = RequestTable(1)
    for index in range(KEPT_PER_RUNNING):
        table.accept(submit(f"req-{index}"))
        with pytest.raises(QueueFull) as refused:
            table.accept(submit("req-more"))
        assert refused.value.retry_after_s
        table.produced(produced(0, [1], FinishReason.STOP, f"req-{index}"), 0.0)
    # None runs, but as many finished ones wait for their acknowledgement as may.
    assert table.running == 0
    with pytest.raises(QueueFull):
        table.accept(submit("req-more"))
    table.acknowledge(GATEWAY, ack(1, done=True, request_id="req-0"), 0.0)
    table.accept(submit("req-more"))


def test_a_submit_that_comes_after_its_own_end_does_not_run() -> None:
    table = RequestTable(max_running=4)
    assert table.acknowledge(GATEWAY, ack(0), 0.0) is None
    assert not table.knows(RequestKey(RequestId("req-1"), 1))
    assert table.acknowledge(GATEWAY, ack(0, done=True), 0.0) is None
    assert table.knows(RequestKey(RequestId("req-1"), 1))
    assert not table.knows(RequestKey(RequestId("req-1"), 2))
    assert table.running == 0


def test_finished_but_never_acknowledged_is_forgotten_in_the_end() -> None:
    table = RequestTable(8)
    table.accept(submit())
    table.produced(produced(0, [1], FinishReason.STOP), 100.0)
    assert table.expire(100.0 + FINISHED_KEPT_S - 1) == ()
    assert len(table) == 1
    assert table.expire(100.0 + FINISHED_KEPT_S) == ()
    assert len(table) == 0
    with pytest.raises(NotFound):
        table.resend(ask(0))


def test_a_silent_gateways_request_is_aborted_and_an_acknowledging_ones_is_not() -> None:
    table = RequestTable(8)
    table.accept(submit())
    assert table.expire(1000.0) == (), "nothing was sent yet, so nothing can be acknowledged"
    table.produced(produced(0, [1]), 1000.0)
    table.acknowledge(GATEWAY, ack(1), 1009.0)
    table.produced(produced(1, [2]), 1009.5)
    assert table.expire(1012.0) == ()
    assert table.expire(1009.5 + SILENCE_S) == (RequestKey(RequestId("req-1"), 1),)
    assert table.expire(1009.5 + SILENCE_S) == (), "the engine was told once"
    assert table.in_flight(INSTANCE) == 1, "until the engine confirms"
    table.produced(produced(2, [], FinishReason.CANCELLED), 1020.0)
    assert (len(table), table.in_flight(INSTANCE)) == (0, 0)


def test_silence_while_the_bus_was_down_does_not_count() -> None:
    table = RequestTable(8)
    table.accept(submit())
    table.produced(produced(0, [1]), 0.0)
    table.bus_was_down(SILENCE_S)
    assert table.expire(SILENCE_S + 1) == ()


def test_only_its_own_gateway_may_cancel_or_acknowledge() -> None:
    table = RequestTable(8)
    table.accept(submit())
    other = GatewayId("gw-2")
    assert table.cancel(other, [RequestId("req-1")]) == ()
    assert table.acknowledge(other, ack(0, done=True), 0.0) is None
    assert table.cancel(GATEWAY, [RequestId("req-1")]) == (RequestKey(RequestId("req-1"), 1),)


def test_done_before_the_engine_is_done_aborts() -> None:
    table = RequestTable(8)
    table.accept(submit())
    table.produced(produced(0, [1, 2]), 0.0)
    assert table.acknowledge(GATEWAY, ack(2, done=True), 0.0) == RequestKey(RequestId("req-1"), 1)
    # It was on its way when the abort was sent; no client hears of it.
    assert table.produced(produced(2, [3]), 0.0) is None
    assert table.produced(produced(3, [], FinishReason.CANCELLED), 0.0) is None
    assert len(table) == 0


def test_the_engines_death_ends_what_runs_and_keeps_what_is_owed() -> None:
    table = RequestTable(8)
    table.accept(submit())
    table.produced(produced(0, [1, 2]), 0.0)
    (unsent,) = table.fail("engine_failed", "it ended", 0.0)
    told = table.entry(unsent.key, unsent.position)
    assert told is not None
    assert (told.seq, told.token_ids) == (2, [])
    assert (told.finish, told.code) == (FinishReason.ERROR, "engine_failed")
    entry = table.resend(ask(0))
    assert entry is not None
    assert (entry.token_ids, entry.finish) == ([1, 2], FinishReason.ERROR)


def test_a_skipped_position_is_a_bug_and_not_passed_on() -> None:
    table = RequestTable(8)
    table.accept(submit())
    with pytest.raises(InternalError):
        table.produced(produced(1, [1]), 0.0)


def test_resend_outside_what_is_kept_is_refused() -> None:
    table = RequestTable(8)
    table.accept(submit())
    table.produced(produced(0, [1, 2]), 0.0)
    table.acknowledge(GATEWAY, ack(1), 0.0)
    assert table.resend(ask(2)) is None, "nothing new"
    for from_seq in (0, 3):
        with pytest.raises(BadRequest):
            table.resend(ask(from_seq))


def test_what_is_told_of_a_prompt_goes_with_the_first_token_until_it_has_arrived() -> None:
    table = RequestTable(max_running=1)
    table.accept(submit())
    prompt = PromptLogprobs(logprobs=(-1.0,), ranks=(1,))
    first = Produced(
        request_id=RequestId("req-1"),
        attempt=1,
        position=0,
        token_ids=(5,),
        cached_tokens=16,
        prompt=prompt,
    )
    table.produced(first, 0.0)
    table.produced(produced(1, [6]), 0.0)
    key = RequestKey(RequestId("req-1"), 1)

    def told(entry: TokenEntry | None) -> tuple[int, PromptLogprobs | None]:
        assert entry is not None
        return entry.cached_tokens, entry.prompt

    assert told(table.entry(key, 0)) == told(table.resend(ask(0))) == (16, prompt)
    assert told(table.entry(key, 1)) == (0, None)
    table.acknowledge(GATEWAY, ack(1), 0.0)
    assert told(table.resend(ask(1))) == (0, None)


def test_a_vector_goes_with_its_token_until_that_has_arrived() -> None:
    table = RequestTable(max_running=1)
    table.accept(submit())
    made = Produced(
        request_id=RequestId("req-1"),
        attempt=1,
        position=0,
        token_ids=(0,),
        finish=FinishReason.LENGTH,
        vector=b"\x00\x00\x80\x3f",
    )
    table.produced(made, 0.0)
    key = RequestKey(RequestId("req-1"), 1)
    for entry in (table.entry(key, 0), table.resend(ask(0))):
        assert entry is not None
        assert (entry.vector, entry.finish) == (made.vector, FinishReason.LENGTH)
    table.acknowledge(GATEWAY, ack(1), 0.0)
    assert table.entry(key, 1) is not None
    assert table.entry(key, 1).vector is None


def test_tokens_say_what_the_device_gave_their_request_so_far() -> None:
    """Two requests of which one comes later: the seconds that both were there are halved."""
    table = RequestTable(8)
    for request_id, at_s in (("req-1", 1.0), ("req-2", 3.0)):
        table.accept(submit(request_id))
        table.shares.begin(RequestKey(RequestId(request_id), 1), at_s)
    table.produced(produced(0, [5]), 5.0)
    first = table.entry(RequestKey(RequestId("req-1"), 1), 0)
    assert first is not None
    assert first.device_s == 3.0
    table.produced(produced(1, [6], FinishReason.STOP), 7.0)
    table.produced(produced(0, [7], FinishReason.STOP, request_id="req-2"), 8.0)
    ends = [table.entry(RequestKey(RequestId(name), 1), 0) for name in ("req-1", "req-2")]
    assert [entry.device_s for entry in ends if entry is not None] == [4.0, 3.0]
    assert len(table.shares) == 0


def test_a_cancelled_request_has_its_share_until_the_engine_confirms() -> None:
    table = RequestTable(8)
    for request_id in ("req-1", "req-2"):
        table.accept(submit(request_id))
        table.shares.begin(RequestKey(RequestId(request_id), 1), 0.0)
    table.cancel(GATEWAY, [RequestId("req-1")])
    table.produced(produced(0, [7], request_id="req-2"), 2.0)
    table.produced(produced(0, [], FinishReason.CANCELLED), 4.0)
    table.produced(produced(1, [8], FinishReason.STOP, request_id="req-2"), 6.0)
    last = table.entry(RequestKey(RequestId("req-2"), 1), 0)
    assert last is not None
    assert last.device_s == 4.0
