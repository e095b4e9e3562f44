"""Lending KV: what the cache divides, what a worker does of it, and both together to rest."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.ids import InstanceId
from pilotlight.policy.lending import (
    Borrower,
    LendingRules,
    LentStage,
    Loan,
    counted_build,
    divide,
    lend_build,
    next_resize,
)

RULES = LendingRules(kept_back_share=0.1)
LONG_S = 1e9
MEMORY = st.integers(1, 10_000)
BYTES = st.integers(0, 10_000)
BORROWERS = st.lists(
    st.builds(
        Borrower,
        instance_id=st.just(InstanceId("i")),
        offered_bytes=BYTES,
        wanted_bytes=BYTES,
        most_bytes=BYTES,
        weight=st.floats(0, 100),
    ),
    max_size=5,
).map(
    lambda ones: [
        replace(one, instance_id=InstanceId(f"i{index}")) for index, one in enumerate(ones)
    ]
)


def borrower(name: str = "a", **other: object) -> Borrower:
    facts: dict[str, object] = {
        "instance_id": InstanceId(name),
        "offered_bytes": 0,
        "wanted_bytes": 0,
        "most_bytes": 10_000,
        "weight": 1.0,
    }
    return Borrower(**(facts | other))


def lent(name: str = "a", **other: object) -> LentStage:
    facts: dict[str, object] = {
        "instance_id": InstanceId(name),
        "granted_bytes": 100,
        "lent_bytes": 0,
        "offered_bytes": 0,
        "wanted_bytes": 0,
        "quiet": True,
    }
    return LentStage(**(facts | other))


def sizes(loans: tuple[Loan, ...]) -> list[int]:
    return [loan.num_bytes for loan in loans]


def test_an_instance_alone_on_a_device_is_lent_all_but_what_is_kept_back() -> None:
    assert sizes(divide(1000, 200, [borrower()], LONG_S, RULES)) == [700]


def test_a_newcomers_grant_goes_before_every_loan() -> None:
    lent_all = borrower(offered_bytes=700)
    assert sizes(divide(1000, 650, [lent_all], 0.0, RULES)) == [250]
    assert sizes(divide(1000, 950, [lent_all], 0.0, RULES)) == [0]


def test_importance_decides_and_what_requests_want_goes_first() -> None:
    both = [borrower("a", weight=3.0), borrower("b", weight=1.0)]
    assert sizes(divide(1000, 100, both, LONG_S, RULES)) == [600, 200]
    wants = [borrower("a", weight=3.0), borrower("b", weight=1.0, wanted_bytes=400)]
    assert sizes(divide(1000, 100, wants, LONG_S, RULES)) == [300, 500]


def test_loans_are_not_moved_for_little_or_too_soon() -> None:
    both = [borrower("a", offered_bytes=450), borrower("b", offered_bytes=350)]
    assert sizes(divide(1000, 100, both, LONG_S, RULES)) == [450, 350], "less than the slack"
    far = [borrower("a", offered_bytes=700), borrower("b", offered_bytes=100)]
    assert sizes(divide(1000, 100, far, 0.0, RULES)) == [700, 100], "they were moved just now"
    assert sizes(divide(1000, 100, far, LONG_S, RULES)) == [400, 400]
    short = [borrower("a", offered_bytes=450), borrower("b", offered_bytes=350, wanted_bytes=390)]
    assert sum(sizes(divide(1000, 100, short, LONG_S, RULES))) == 800
    assert sizes(divide(1000, 100, short, LONG_S, RULES))[1] >= 390, "requests wait for it"


@given(MEMORY, BYTES, BORROWERS, st.sampled_from((0.0, LONG_S)))
def test_loans_fit_beside_grants_and_come_to_rest(
    memory: int, granted: int, borrowers: list[Borrower], settled_s: float
) -> None:
    loans = sizes(divide(memory, granted, borrowers, settled_s, RULES))
    pool = max(0, memory - granted - int(memory * RULES.kept_back_share))
    assert sum(loans) <= pool
    assert all(0 <= loan <= one.most_bytes for loan, one in zip(loans, borrowers, strict=True))
    told = [replace(one, offered_bytes=loan) for one, loan in zip(borrowers, loans, strict=True)]
    assert sizes(divide(memory, granted, told, settled_s, RULES)) == loans


@given(MEMORY, BYTES, BORROWERS)
def test_nothing_that_could_be_used_is_left_over(
    memory: int, granted: int, borrowers: list[Borrower]
) -> None:
    fresh = [replace(one, offered_bytes=0) for one in borrowers]
    loans = sizes(divide(memory, granted, fresh, LONG_S, RULES))
    pool = max(0, memory - granted - int(memory * RULES.kept_back_share))
    slack = int(memory * RULES.slack_share) * len(fresh)
    useful = min(pool, sum(one.most_bytes for one in fresh))
    assert sum(loans) >= useful - slack - len(fresh)


def test_a_worker_gives_a_newcomer_room_in_one_step_and_before_it_is_told() -> None:
    resize = next_resize(1000, 450, [lent(lent_bytes=700, offered_bytes=700)], RULES)
    assert resize is not None
    assert (resize.lent_bytes, resize.grows) == (550, False)


def test_the_loan_that_is_furthest_above_what_is_wanted_shrinks() -> None:
    stages = [
        lent("a", lent_bytes=400, offered_bytes=400, wanted_bytes=400),
        lent("b", lent_bytes=300, offered_bytes=300),
    ]
    resize = next_resize(1000, 400, stages, RULES)
    assert resize is not None
    assert (resize.instance_id, resize.lent_bytes) == ("b", 200)


def test_requests_that_wait_get_kv_in_large_steps_and_nobody_else_during_a_start() -> None:
    starts = lent(offered_bytes=800, quiet=False)
    assert next_resize(1000, 100, [starts], RULES) is None
    waits = next_resize(1000, 100, [replace(starts, wanted_bytes=10)], RULES)
    assert waits is not None
    assert (waits.lent_bytes, waits.urgent) == (125, True)
    start = next_resize(1000, 100, [replace(starts, wanted_bytes=10, starts=True)], RULES)
    assert start is not None
    assert start.lent_bytes == 10
    much = next_resize(1000, 100, [replace(starts, wanted_bytes=600)], RULES)
    assert much is not None
    assert much.lent_bytes == 600
    quiet = next_resize(1000, 100, [replace(starts, quiet=True)], RULES)
    assert quiet is not None
    assert (quiet.lent_bytes, quiet.urgent) == (15, False)


STAGES = st.lists(
    st.builds(
        LentStage,
        instance_id=st.just(InstanceId("i")),
        granted_bytes=st.integers(0, 2000),
        lent_bytes=st.integers(0, 3000),
        offered_bytes=st.integers(0, 3000),
        wanted_bytes=st.integers(0, 3000),
        quiet=st.booleans(),
        starts=st.booleans(),
    ),
    max_size=4,
).map(
    lambda ones: [
        replace(one, instance_id=InstanceId(f"i{index}")) for index, one in enumerate(ones)
    ]
)


def test_memory_that_gives_no_room_yet_is_no_room_for_requests() -> None:
    """Quiet growth says where it ends; requests that wait get what there is at once."""
    quiet = next_resize(1000, 100, [lent(offered_bytes=600)], RULES)
    assert quiet is not None
    assert (quiet.lent_bytes, quiet.target_bytes, quiet.urgent) == (15, 600, False)
    half_way = {"lent_bytes": 300, "unready_bytes": 200, "offered_bytes": 600}
    urgent = next_resize(1000, 100, [lent(wanted_bytes=150, **half_way)], RULES)
    assert urgent is not None
    assert (urgent.lent_bytes, urgent.target_bytes, urgent.urgent) == (300, 0, True)
    taken = next_resize(1000, 700, [lent(**half_way)], RULES)
    assert taken is not None
    assert (taken.lent_bytes, taken.target_bytes) == (300, 300), "no more is to be had"
    assert next_resize(1000, 700, [lent(quiet=False, **half_way)], RULES) is None


@given(st.integers(100, 10_000), STAGES)
def test_resizes_end_never_exceed_the_device_and_leave_grants_alone(
    memory: int, stages: list[LentStage]
) -> None:
    granted = sum(one.granted_bytes for one in stages)
    by_name = {one.instance_id: one for one in stages}
    for _ in range(400):
        resize = next_resize(memory, granted, list(by_name.values()), RULES)
        if resize is None:
            break
        before = by_name[resize.instance_id]
        assert resize.lent_bytes >= 0
        assert (resize.lent_bytes > before.lent_bytes) is resize.grows
        by_name[resize.instance_id] = replace(before, lent_bytes=resize.lent_bytes)
        taken = granted + sum(one.lent_bytes for one in by_name.values())
        assert not resize.grows or taken <= memory
    else:
        raise AssertionError("it does not come to rest")
    assert granted + sum(one.lent_bytes for one in by_name.values()) <= memory or not any(
        one.lent_bytes for one in by_name.values()
    )
    for one in by_name.values():
        assert one.lent_bytes <= one.offered_bytes or not one.lent_bytes


def test_a_build_has_what_no_grant_takes_and_no_request_wants_or_nothing() -> None:
    idle, busy = borrower("a", offered_bytes=800), borrower("b", wanted_bytes=300)
    assert lend_build(1000, 100, [idle], 900) == 900, "loans go before it only if used"
    assert lend_build(1000, 100, [idle], 901) == 0
    assert lend_build(1000, 101, [idle], 900) == 0, "a start goes before it"
    assert lend_build(1000, 100, [idle, busy], 600) == 600
    assert lend_build(1000, 100, [idle, busy], 601) == 0, "and so does what requests want"
    assert lend_build(1000, 0, [], 1000) == 1000


@given(MEMORY, BYTES, BORROWERS, BYTES)
def test_builds_and_what_requests_want_are_never_more_than_there_is(
    memory: int, granted: int, borrowers: list[Borrower], asked: int
) -> None:
    build = lend_build(memory, granted, borrowers, asked)
    assert build in (0, asked)
    wanted = sum(min(one.wanted_bytes, one.most_bytes) for one in borrowers)
    if build:
        assert granted + build + wanted <= memory


def test_a_loan_shrinks_for_a_build_and_grows_into_nothing_that_one_still_has() -> None:
    stage = lent(granted_bytes=100, lent_bytes=900, offered_bytes=900)
    called = counted_build(500, 0, 0, leaves=False)
    shrinks = next_resize(1000, 100 + called, [stage], RULES)
    assert shrinks is not None
    assert (shrinks.lent_bytes, shrinks.grows) == (400, False)
    after = replace(stage, lent_bytes=400)
    assert (
        next_resize(1000, 100 + counted_build(500, 500, 500, leaves=False), [after], RULES) is None
    )
    # It makes way for a grant of 200, and its process has not ended.
    newcomer = lent("b", granted_bytes=200, starts=True)
    leaving = counted_build(0, 500, 300, leaves=True)
    assert leaving == 300
    assert next_resize(1000, 300 + leaving, [after, newcomer], RULES) is None
    # Grants alone are more than the device has beside the loan: that shrinks, by no more.
    assert counted_build(0, 500, -100, leaves=True) == 0
    gone = next_resize(1000, 300, [after, newcomer], RULES)
    assert gone is not None
    assert gone.grows
