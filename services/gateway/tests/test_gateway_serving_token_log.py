"""Safety of the output's order: whatever is dropped, repeated or reordered, the text is exactly
right.
"""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.common.messages.tokens import TokenEntry
from pilotlight.gateway.serving.token_log import TokenLog
from pilotlight.policy.ids import RequestId
from pilotlight.policy.request import FinishReason

REQUEST = RequestId("req-0")


def entry(seq, token_ids, finish=None):
    return TokenEntry(
        request_id=REQUEST,
        attempt=1,
        seq=seq,
        token_ids=token_ids,
        logprobs=[float(token) for token in token_ids],
        finish=finish,
    )


@st.composite
def outputs(draw):
    """An output cut into entries, and a delivery of some of them, in any order, any number of
    times, cut anew by resends.
    """
    start = draw(st.integers(0, 5))
    token_ids = draw(st.lists(st.integers(0, 1000), max_size=30))
    cuts = sorted({0, len(token_ids), *draw(st.lists(st.integers(0, len(token_ids)), max_size=8))})
    entries = [entry(start + low, token_ids[low:high]) for low, high in pairwise(cuts)]
    entries.append(entry(start + len(token_ids), [], FinishReason.STOP))
    sent = draw(st.lists(st.sampled_from(entries), max_size=40))
    return start, token_ids, entries, sent


def resent(start, token_ids, from_seq):
    return entry(from_seq, token_ids[from_seq - start :], FinishReason.STOP)


@settings(max_examples=300, deadline=None)
@given(outputs(), st.randoms(use_true_random=False))
def test_every_token_once_and_in_order(output, rng):
    start, token_ids, _, sent = output
    log = TokenLog(start)
    taken = []
    for one in sent:
        log.offer(one)
        taken += log.fresh()
        if log.gap and rng.random() < 0.5:
            # A resend answers with all there is, or is lost.
            log.offer(resent(start, token_ids, log.next_seq))
            taken += log.fresh()
        assert [token.token_id for token in taken] == token_ids[: len(taken)]
    if log.finish is None:
        log.offer(resent(start, token_ids, log.next_seq))
        taken += log.fresh()
    assert log.finish is FinishReason.STOP
    assert [token.token_id for token in taken] == token_ids
    assert [token.logprob for token in taken] == [float(token_id) for token_id in token_ids]
    assert not log.gap


@settings(max_examples=200, deadline=None)
@given(outputs())
def test_a_gap_is_seen_exactly_when_something_later_came(output):
    start, token_ids, _, sent = output
    log = TokenLog(start)
    for one in sent:
        beyond = one.seq > log.next_seq and log.finish is None
        log.offer(one)
        if beyond:
            assert log.gap
    if log.finish is not None:
        assert len(log.fresh()) == len(token_ids)


def test_nothing_is_taken_after_the_end():
    log = TokenLog(0)
    assert log.offer(entry(0, [1], FinishReason.LENGTH))
    assert not log.offer(entry(1, [2]))
    assert [token.token_id for token in log.fresh()] == [1]


def test_overlap_is_taken_in_part():
    log = TokenLog(0)
    log.offer(entry(0, [1, 2]))
    log.offer(entry(1, [2, 3, 4]))
    assert [token.token_id for token in log.fresh()] == [1, 2, 3, 4]
    assert log.next_seq == 4
