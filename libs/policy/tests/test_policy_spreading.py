"""Which requests leave the lead of a group when its workers have become instances."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.spreading import RunningRequest, spread

LEAD, OTHERS = InstanceId("i"), (InstanceId("i-1"), InstanceId("i-2"))


def requests(
    *, on_lead: int, on: tuple[int, ...] = (), held: int = 10, left: int = 10
) -> list[RunningRequest]:
    """So many on the lead, and on each of the others."""
    counts = dict(zip((LEAD, *OTHERS), (on_lead, *on), strict=False))
    return [
        RunningRequest(
            request_id=RequestId(f"{instance_id}/{number}"),
            instance_id=instance_id,
            computed_tokens=held,
            left_tokens=left,
        )
        for instance_id, count in counts.items()
        for number in range(count)
    ]


def test_half_of_them_go_on_at_the_second_instance() -> None:
    assert len(spread(requests(on_lead=6), LEAD, OTHERS[:1])) == 3
    assert len(spread(requests(on_lead=7), LEAD, OTHERS[:1])) == 3
    assert spread(requests(on_lead=1), LEAD, OTHERS) == ()


def test_what_others_have_already_counts() -> None:
    assert len(spread(requests(on_lead=4, on=(2, 0)), LEAD, OTHERS)) == 2
    assert spread(requests(on_lead=2, on=(4, 0)), LEAD, OTHERS) == ()


def test_requests_of_other_instances_do_not_count() -> None:
    elsewhere = [
        RunningRequest(
            request_id=RequestId("x"),
            instance_id=InstanceId("j"),
            computed_tokens=1,
            left_tokens=9,
        )
    ]
    assert len(spread([*requests(on_lead=4), *elsewhere * 9], LEAD, OTHERS[:1])) == 2


def test_those_leave_that_have_little_to_compute_again_and_much_to_come() -> None:
    def one(name: str, held: int, left: int) -> RunningRequest:
        return RunningRequest(
            request_id=RequestId(name), instance_id=LEAD, computed_tokens=held, left_tokens=left
        )

    running = [one("ends", 50, 0), one("long", 4000, 100), one("new", 20, 500), one("waits", 0, 9)]
    assert spread(running, LEAD, OTHERS[:1]) == ("waits", "new")


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(1, 2))
def test_the_lead_keeps_its_share_and_no_less(
    on_lead: int, first: int, second: int, others: int
) -> None:
    """And a second look, with those that left shared out, moves none."""
    there = OTHERS[:others]
    running = requests(on_lead=on_lead, on=(first, second)[:others])
    leave = spread(running, LEAD, there)
    left = on_lead - len(leave)
    total = on_lead + sum((first, second)[:others])
    assert len(leave) == len(set(leave))
    assert left <= on_lead
    assert not leave or left == -(-total // (1 + others))
    counts = Counter({LEAD: left, **dict(zip(there, (first, second), strict=False))})
    for _ in leave:
        counts[min(there, key=counts.__getitem__)] += 1
    after = requests(on_lead=counts[LEAD], on=tuple(counts[one] for one in there))
    assert spread(after, LEAD, there) == ()
