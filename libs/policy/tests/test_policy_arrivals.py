"""Arrivals: what gateways count and tell, what a listener makes of it."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.arrivals import (
    MAX_TOLD,
    SLOT_S,
    WINDOW_S,
    WINDOW_SLOTS,
    Access,
    ArrivalCount,
    ArrivalCounters,
    ArrivalWindows,
    CounterLife,
)
from pilotlight.policy.ids import GatewayId, ModelName
from pilotlight.policy.liveness import FORGET_AFTER_S

FOX, HEN = ModelName("fox"), ModelName("hen")
MODELS = [ModelName(f"m{index}") for index in range(4)]


@dataclass
class Message:
    life: CounterLife
    counts: tuple[ArrivalCount, ...]


@dataclass
class Gateway:
    """A gateway process with its counters."""

    name: str
    now_s: float
    process: int = 1
    counters: ArrivalCounters = field(init=False)

    def __post_init__(self) -> None:
        self.counters = ArrivalCounters(self.now_s)

    def message(self, now_s: float, *, repeated: int = 1) -> Message:
        number = f"{self.process}.{self.counters.life}"
        life = CounterLife(
            gateway_id=GatewayId(self.name), number=number, age_s=self.counters.age_s(now_s)
        )
        return Message(life, self.counters.tell(now_s, repeated=repeated))

    def restart(self, now_s: float) -> None:
        self.process += 1
        self.counters = ArrivalCounters(now_s)


def hear(windows: ArrivalWindows, message: Message, now_s: float) -> tuple[Access, ...]:
    return windows.hear(message.life, message.counts, now_s, now_s)


class PlainRecount:
    """Every increment of every total, kept for ever and counted one by one."""

    def __init__(self) -> None:
        self.highest: dict[tuple[str, str, ModelName], int] = {}
        self.events: list[tuple[ModelName, float, int]] = []

    def hear(self, message: Message, now_s: float) -> None:
        for one in message.counts:
            key = (message.life.gateway_id, message.life.number, one.model)
            new = one.total - self.highest.get(key, 0)
            if new > 0:
                self.highest[key] = one.total
                self.events.append((one.model, now_s - one.idle_s, new))

    def count(self, model: ModelName, now_s: float) -> int:
        oldest = now_s // SLOT_S - WINDOW_SLOTS
        return sum(
            count for one, at_s, count in self.events if one == model and at_s // SLOT_S > oldest
        )

    def last_s(self, model: ModelName) -> float | None:
        return max((at_s for one, at_s, _ in self.events if one == model), default=None)


STEPS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, 1), st.sampled_from(MODELS)),
    st.tuples(st.just("tell"), st.integers(0, 1), st.integers(0, 2)),
    st.tuples(st.just("deliver"), st.integers(0, 30), st.none()),
    st.tuples(st.just("restart"), st.integers(0, 1), st.none()),
    st.tuples(st.just("pass"), st.sampled_from([0.25, 1.0, 3.0, 9.75]), st.none()),
)


@given(st.lists(STEPS, max_size=60))
def test_whatever_is_lost_late_or_repeated_the_listener_agrees_with_a_plain_recount(
    steps: list[tuple[str, float, ModelName | int | None]],
) -> None:
    now_s = 1000.0
    gateways = [Gateway("a", now_s), Gateway("b", now_s)]
    windows, recount, sent = ArrivalWindows(now_s), PlainRecount(), list[Message]()

    def deliver(message: Message) -> None:
        hear(windows, message, now_s)
        recount.hear(message, now_s)

    arrived: dict[tuple[str, int, ModelName], int] = {}
    for step, number, what in steps:
        if step == "arrive":
            gateway = gateways[int(number)]
            assert isinstance(what, str)
            gateway.counters.count(ModelName(what), now_s)
            key = (gateway.name, gateway.process, ModelName(what))
            arrived[key] = arrived.get(key, 0) + 1
        elif step == "tell":
            assert isinstance(what, int)
            sent.append(gateways[int(number)].message(now_s, repeated=what))
        elif step == "deliver" and sent:
            deliver(sent[int(number) % len(sent)])
        elif step == "restart":
            gateways[int(number)].restart(now_s)
        elif step == "pass":
            now_s += number
        recent = windows.recent()
        for model in MODELS:
            assert recent.count(model, now_s) == recount.count(model, now_s)
            assert recent.last_s(model) == recount.last_s(model)

    # In the end every gateway that lives is heard as often as it needs to tell everything once
    # more.
    for gateway in gateways:
        for _ in MODELS:
            deliver(gateway.message(now_s))
        heard = {
            key: total
            for key, total in recount.highest.items()
            if key[:2] == (gateway.name, f"{gateway.process}.1")
        }
        alive = {
            key[2]: total
            for key, total in arrived.items()
            if key[:2] == (gateway.name, gateway.process)
        }
        assert {model: total for (_, _, model), total in heard.items()} == alive, (
            "a lost message lost an arrival"
        )
    later_s = now_s + WINDOW_S + SLOT_S
    assert all(windows.recent().count(model, later_s) == 0 for model in MODELS)


@given(st.lists(st.tuples(st.floats(0, 40), st.sampled_from(MODELS)), max_size=40))
def test_told_at_once_the_window_counts_what_arrived_in_its_slots(
    gaps: list[tuple[float, ModelName]],
) -> None:
    now_s = 12_345.0
    gateway, windows = Gateway("a", now_s), ArrivalWindows(now_s)
    times: list[tuple[float, ModelName]] = []
    for gap_s, model in gaps:
        now_s += gap_s
        gateway.counters.count(model, now_s)
        times.append((now_s, model))
        assert hear(windows, gateway.message(now_s, repeated=0), now_s) == (
            Access(model=model, count=1, at_s=now_s),
        )
    for model in MODELS:
        within = [
            at_s
            for at_s, one in times
            if one == model and at_s // SLOT_S > now_s // SLOT_S - WINDOW_SLOTS
        ]
        assert windows.recent().count(model, now_s) == len(within)


def test_a_rate_is_over_the_time_that_was_listened_to() -> None:
    gateway, windows = Gateway("a", 1000.0), ArrivalWindows(1000.0)
    for _ in range(60):
        gateway.counters.count(FOX, 1005.0)
    hear(windows, gateway.message(1005.0), 1005.0)
    assert windows.recent().rate_per_s(FOX, 1005.0) == 60 / SLOT_S, (
        "a short time says little: at least a slot"
    )
    assert windows.recent().rate_per_s(FOX, 1060.0) == 1.0
    full_s = 1000.0 + WINDOW_S - SLOT_S
    assert windows.recent().rate_per_s(FOX, full_s) == 60 / (WINDOW_S - SLOT_S)
    assert windows.recent().rate_per_s(FOX, full_s + SLOT_S) == 0.0
    assert windows.recent().rate_per_s(HEN, 1060.0) == 0.0


def test_who_begins_late_counts_no_arrivals_of_before() -> None:
    gateway = Gateway("a", 0.0)
    for _ in range(500):
        gateway.counters.count(FOX, 900.0)
        gateway.counters.count(HEN, 1001.0)
    windows = ArrivalWindows(1000.0)
    heard = hear(windows, gateway.message(1002.0), 1002.0)
    assert heard == (Access(model=HEN, count=1, at_s=1001.0),), (
        "one of them came since, perhaps more"
    )
    assert windows.recent().last_s(FOX) == 900.0
    assert windows.recent().count(FOX, 1002.0) == 0
    gateway.counters.count(FOX, 1003.0)
    gateway.counters.count(HEN, 1003.0)
    heard = hear(windows, gateway.message(1003.0), 1003.0)
    assert {(one.model, one.count) for one in heard} == {(FOX, 1), (HEN, 1)}


def test_a_gateway_that_starts_anew_counts_from_zero() -> None:
    gateway, windows = Gateway("a", 1000.0), ArrivalWindows(1000.0)
    gateway.counters.count(FOX, 1001.0)
    gateway.counters.count(FOX, 1001.0)
    late = gateway.message(1001.0)
    hear(windows, late, 1001.0)
    gateway.restart(1002.0)
    gateway.counters.count(FOX, 1003.0)
    assert hear(windows, gateway.message(1003.0), 1003.0) == (
        Access(model=FOX, count=1, at_s=1003.0),
    )
    assert hear(windows, late, 1004.0) == (), "a message of the process before"
    assert windows.recent().count(FOX, 1004.0) == 3
    assert windows.gateways == 1


def test_a_silent_gateway_is_forgotten_and_not_counted_twice_when_it_returns() -> None:
    lost, other, windows = Gateway("a", 1000.0), Gateway("b", 1000.0), ArrivalWindows(1000.0)
    lost.counters.count(FOX, 1001.0)
    other.counters.count(HEN, 1001.0)
    hear(windows, lost.message(1001.0), 1001.0)
    hear(windows, other.message(1001.0), 1001.0)
    silent_s = 1001.0 + FORGET_AFTER_S
    # While nothing could be heard at all, the listening clock stands still.
    windows.hear(other.message(silent_s).life, (), silent_s, 1002.0)
    assert windows.gateways == 2
    hear(windows, other.message(silent_s), silent_s)
    assert windows.gateways == 1
    assert hear(windows, lost.message(silent_s + 1), silent_s + 1) == ()
    assert windows.recent().count(FOX, silent_s + 1) == 1
    lost.counters.count(FOX, silent_s + 2)
    assert [one.count for one in hear(windows, lost.message(silent_s + 2), silent_s + 2)] == [1]
    begun = Gateway("c", silent_s + 1)
    begun.counters.count(HEN, silent_s + 2)
    begun.counters.count(HEN, silent_s + 2)
    assert [one.count for one in hear(windows, begun.message(silent_s + 2), silent_s + 2)] == [2], (
        "it began since"
    )


def test_what_was_told_stays_as_it_was() -> None:
    gateway, windows = Gateway("a", 1000.0), ArrivalWindows(1000.0)
    gateway.counters.count(FOX, 1001.0)
    hear(windows, gateway.message(1001.0), 1001.0)
    before = windows.recent()
    assert windows.recent() is before, "nothing was heard"
    gateway.counters.count(FOX, 1002.0)
    gateway.counters.count(HEN, 1002.0)
    hear(windows, gateway.message(1002.0), 1002.0)
    assert (before.count(FOX, 1002.0), before.last_s(HEN)) == (1, None)
    assert (windows.recent().count(FOX, 1002.0), windows.recent().last_s(HEN)) == (2, 1002.0)
    assert windows.recent().of([HEN]).models.keys() == {HEN}


def test_a_message_is_bounded_and_everything_is_told_in_turn() -> None:
    counters = ArrivalCounters(0.0)
    names = [ModelName(f"n{index}") for index in range(MAX_TOLD + 7)]
    for name in names:
        counters.count(name, 1.0)
    first = counters.tell(2.0)
    assert [one.model for one in first] == names[:MAX_TOLD]
    assert counters.changed
    second = counters.tell(3.0, repeated=3)
    assert [one.model for one in second] == [*names[MAX_TOLD:], *names[:3]]
    assert not counters.changed
    assert [one.model for one in counters.tell(4.0, repeated=2)] == names[3:5]
    assert second[0] == ArrivalCount(model=names[MAX_TOLD], total=1, idle_s=2.0)


def test_a_model_too_many_begins_a_new_life() -> None:
    counters = ArrivalCounters(0.0, max_models=2)
    for name in (FOX, HEN, FOX):
        counters.count(name, 1.0)
    assert (counters.life, counters.models) == (1, 2)
    counters.count(ModelName("owl"), 5.0)
    assert (counters.life, counters.models, counters.age_s(7.0)) == (2, 1, 2.0)
    assert [one.model for one in counters.tell(7.0)] == ["owl"]
