"""Bytes, bandwidths and tokens to seconds.

The only cost model: policies and the simulator both ask here.

::

    ready of stage i    max(fetch_i, context_i + max(load_i, libraries_i, init_i))    bytes stream: loads run beside fetches
    TTFT of a group     wait + max over i of (ready_i + sum over j >= i of (prefill_j + hop))    whole stages; see through_s
    TPOT of a group     sum over i of (decode_i + hop)           no hop at all when there is one stage
    step of an engine   decode + prompt tokens / prefill rate    one batch: every request in it gets one token
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pilotlight.policy.cluster import DeviceKind, NodeFacts, Tier, WorkerFacts
from pilotlight.policy.ids import ModelName
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.plan import Estimate, Estimates

GUESSED_PREFILL_S = 0.1
"""Prefill of a usual prompt on a model of which nothing is known yet."""
HOP_S = 0.001
"""Activations from one stage to the next."""
LEAST_KV_TOKENS = 4096
"""An instance without room for these many tokens (or for its whole context, if that is less) is not
worth its load."""
USUAL_KV_TOKENS = 8192
"""Granted where there is room, even to models with a shorter context: several requests run at once.
"""


def transfer_s(size_bytes: float, bytes_per_s: float) -> float:
    """Time to move bytes over a link; infinite over a link without bandwidth, 0 for nothing."""
    if size_bytes <= 0:
        return 0.0
    return size_bytes / bytes_per_s if bytes_per_s > 0 else math.inf


def known_rate(bytes_per_s: float) -> float:
    """A measured bandwidth, as exactly as it is known: two digits.

    Equal devices then count as equal.
    """
    if not 0 < bytes_per_s < math.inf:
        return bytes_per_s
    unit = 10.0 ** (math.floor(math.log10(bytes_per_s)) - 1)
    return round(bytes_per_s / unit) * unit


def share_bytes_per_s(link_bytes_per_s: float, running: int) -> float:
    """What a newcomer gets of a link that is shared equally with ``running`` flows."""
    return link_bytes_per_s / (running + 1)


def fetch_bytes_per_s(node: NodeFacts, estimate: Estimate | None) -> float:
    """What a fetch of a model to a node gets.

    It shares the node's link equally with the transfers that run there. What cold starts of the
    model have shown caps what the link promises: the source may be slower than the node.
    """
    rate = share_bytes_per_s(node.nic_bytes_per_s, len(node.transfers))
    known = 0.0 if estimate is None else estimate.fetch_bytes_per_s
    return min(rate, known) if known > 0 else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpeed:
    """What an engine takes for its work on a device."""

    load_bytes_per_s: float
    """From the host pool to their place."""
    prefill_tokens_per_s: float
    decode_step_s: float
    """A batch without prompts: the parameters are read once, whatever its size."""


def part_load_s(model: Model, part: int, load_bytes_per_s: float) -> float:
    """Time to bring one part of a model from the host pool to its place."""
    return transfer_s(model.part_device_bytes(part), load_bytes_per_s)


def step_s(speed: EngineSpeed, prompt_tokens: int) -> float:
    """Time of one batch of an engine that runs ``prompt_tokens`` of new prompts beside one token of
    each running request.
    """
    return speed.decode_step_s + prompt_tokens / speed.prefill_tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Times of one stage of a cold start, in seconds.

    ParaServe's terms of one server in equation 5, and t_init, which the paper's text names and its
    equations lack. What ``stage_cost`` makes departs in two places: the share of the link takes no
    heed of deadlines (section 4.2, equations 3 and 4), and the decode time is a bound by the load
    rate in place of a measured t_d. ``coldstart`` has both.
    """

    fetch_s: float
    load_s: float
    prefill_s: float
    decode_s: float
    init_s: float = 0.0
    """What the engine takes beside its parameters, or the restore of an artifact."""
    context_s: float = 0.0
    """t_cc + t_cu: before anything can be loaded."""
    libraries_s: float = 0.0
    """t_l: beside loading."""
    streamed_layers: int = 1
    """Layers that run as soon as they are in place; 1: the stage runs when it is whole."""

    @property
    def ready_s(self) -> float:
        """From dispatch until all of the stage can run."""
        beside_s = max(self.load_s, self.libraries_s, self.init_s)
        return max(self.fetch_s, self.context_s + beside_s)

    def through_s(self, following_s: float = 0.0, fetch_s: float | None = None) -> float:
        """From dispatch until the first token, as far as this stage alone delays it.

        Layer k is through at max(through of k - 1, arrival of k) + its prefill. Layers of one size
        arrive at an even pace, so the first or the last of them decides.

        Args:
            following_s: what comes after this stage's prefill.
            fetch_s: in the place of its own; None: its own.
        """
        fetch_s = self.fetch_s if fetch_s is None else fetch_s
        layers, slow_s = self.streamed_layers, max(self.libraries_s, self.init_s)
        first_s = max(fetch_s / layers, self.context_s + max(self.load_s / layers, slow_s))
        last_s = max(fetch_s, self.context_s + max(self.load_s, slow_s))
        return max(first_s + self.prefill_s, last_s + self.prefill_s / layers) + following_s


def group_ttft_s(stages: Sequence[StageCost], wait_s: float = 0.0, hop_s: float = HOP_S) -> float:
    """Predicted time to first token of a group whose stages run in order; infinite when a stage
    never becomes ready.

    ParaServe, equation 5. It departs in two places: stage i delays only the prefill of the stages
    from i on, and each stage has a prefill time of its own in place of a share of t_p.
    """
    hop = hop_s if len(stages) > 1 else 0.0
    latest_s = 0.0
    following_s = 0.0
    for stage in reversed(stages):
        following_s += hop
        latest_s = max(latest_s, stage.through_s(following_s))
        following_s += stage.prefill_s
    return wait_s + latest_s


def group_tpot_s(stages: Sequence[StageCost], hop_s: float = HOP_S) -> float:
    """Predicted time per output token of a group: ParaServe, equation 2, without a hop for one
    stage.
    """
    hop = hop_s if len(stages) > 1 else 0.0
    return sum(stage.decode_s + hop for stage in stages)


def missing_bytes(model: Model, stage: Stage, node: NodeFacts) -> int:
    """Bytes of a stage that are not yet in the node's host pool."""
    present = {
        part
        for copy in node.copies
        if copy.tier is Tier.HOST and copy.digest == model.digest
        for part in copy.parts
    }
    return sum(
        model.spec.part_bytes[part] for part in model.spec.parts_of(stage) if part not in present
    )


def stage_cost(
    model: Model,
    stage: Stage,
    worker: WorkerFacts,
    node: NodeFacts,
    estimate: Estimate | None,
) -> StageCost:
    """Times of one stage on one worker.

    Args:
        model: what the stage is of.
        stage: the layers, [start, stop), that the worker would hold.
        worker: gives the speed of its device where nothing was learned.
        node: gives the link's speed, and the parts that are in its host pool.
        estimate: what was learned of the model on this kind of device; None: nothing yet.
    """
    share = model.spec.stage_bytes(stage) / max(1, model.spec.total_bytes)
    fetch_rate = fetch_bytes_per_s(node, estimate)
    device_rate = load_rate = known_rate(worker.device.load_bytes_per_s)
    prefill_s, init_s = GUESSED_PREFILL_S, 0.0
    if estimate is not None:
        init_s = estimate.init_s
        load_rate = estimate.load_bytes_per_s if estimate.load_bytes_per_s > 0 else load_rate
        prefill_s = estimate.prefill_s if estimate.prefill_s > 0 else prefill_s
    device_bytes = model.device_bytes(stage)
    return StageCost(
        fetch_s=transfer_s(missing_bytes(model, stage, node), fetch_rate),
        load_s=transfer_s(device_bytes, load_rate),
        prefill_s=prefill_s * share,
        # One token reads every parameter once, and a device reads its memory no slower than it is
        # filled from outside.
        decode_s=transfer_s(device_bytes, device_rate),
        init_s=init_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRoom:
    """Device bytes of a stage: parameters plus KV."""

    least_bytes: int
    """Below this the stage is not worth loading."""
    usual_bytes: int
    """Taken where it is free."""

    def granted_bytes(self, free_bytes: int) -> int:
        """What to ask for where ``free_bytes`` are free.

        Nothing is evicted for more than the least, and KV takes no more than half of what the least
        leaves free: a long context must not fill a device on which other models could start.
        """
        beyond = max(0, free_bytes - self.least_bytes) // 2
        return min(max(self.least_bytes, self.usual_bytes), self.least_bytes + beyond)


def stage_room(model: Model, stage: Stage, granule_bytes: int = 1, kv_tokens: int = 0) -> StageRoom:
    """Room that a stage needs at least, and takes where it can. One choice asks some thirty times
    for the same.

    Args:
        model: Of the stage.
        stage: Its layers.
        granule_bytes: In which the device's memory comes.
        kv_tokens: For which KV there has to be room, where that is more than usual.
    """
    return _stage_room(_Same(model), stage, granule_bytes, kv_tokens)


class _Same:
    """A model as a key: it is equal to itself alone, and its dozens of fields are not hashed."""

    __slots__ = ("model",)

    def __init__(self, model: Model) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.model is self.model


@lru_cache(maxsize=1024)
def _stage_room(of: _Same, stage: Stage, granule_bytes: int, kv_tokens: int) -> StageRoom:
    model = of.model
    per_token = model.spec.kv_bytes_per_token(stage, model.dtype)
    context = model.spec.max_context_tokens
    # What whole granules waste at most: less than one for each part, and for each layer's keys and
    # values.
    wasted = (granule_bytes - 1) * (len(model.spec.parts_of(stage)) + 2 * stage.num_layers)
    parameters = model.device_bytes(stage) + wasted
    return StageRoom(
        least_bytes=parameters + per_token * max(kv_tokens, min(context, LEAST_KV_TOKENS)),
        usual_bytes=parameters + per_token * max(context, USUAL_KV_TOKENS),
    )


def may_be_whole(model: Model, stage: Stage, device_bytes: int) -> bool:
    """A stage was granted what the whole model needs at least: a full-memory worker's (ParaServe,
    section 4.1).

    Args:
        model: Its model.
        stage: What it has.
        device_bytes: What it was granted.
    """
    whole = model.spec.whole
    return stage != whole and device_bytes >= stage_room(model, whole).least_bytes


def estimate_for(
    model: ModelName, device_kind: DeviceKind | None, estimates: Estimates
) -> Estimate | None:
    """What is known of a model on a kind of device; on any, without one, and first of all on one
    on which it was started.
    """
    profiled = None
    for estimate in estimates.get(model, ()):
        if device_kind is None or estimate.device_kind is device_kind:
            if estimate.samples:
                return estimate
            profiled = profiled or estimate
    return profiled
