"""What a start takes, learned from every start: by model, kind of device, node and source.

ParaServe takes "historical information" as inputs of its predictions (sections 4.1.2 and 5). Here
each term has one place, a seed for the time before the first sample, and a fallback in between:

::

    term                            learned by               without samples
    t_cc, t_cu, t_l                 node and kind            kind on all nodes; a constant of the kind
    init, restore                   model and kind           the model's profile; 0; restore goes first
    t_p, a line over tokens         model and kind           arithmetic at what other models' prompts showed, or at
                                                             what the device reads a second
    t_d, a line over bytes read     model and kind           bytes over the rate of device memory
    p, host to device               node and kind            the probe; the device's own figure; kind on all
                                                             nodes; profiles of models on the kind
    device memory                   node and kind            the probe; p, as a lower bound
                                                             (what the worker reports goes first)
    b                               node and source          the source at other nodes; the node's
                                                             link. Of a disk: what its node reports
    t_n                             pair of nodes            all pairs; a constant
    rows, commands, request, token  kind on all nodes        0: nothing is known of them

Decode reads device memory, not the bus: t_d of a batch is a line over the bytes of the parameters
and of all keys and values that one step reads.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.decayed import NO_LINE, Line, Mean, Point, mean_after
from pilotlight.policy.cost import HOP_S, transfer_s
from pilotlight.policy.ids import ModelName, NodeId
from pilotlight.policy.model import Model, Stage

ANY = NodeId("")
"""In the place of a node: over all of them."""
ANY_SOURCE = ""
UNTRIED = 1.001
"""What a node is expected to get of a source against what others got: of two that promise the same,
the one that has not fetched yet is taken. Else one whose own link is slow would be, each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTimes:
    """What a worker takes before it can load, and beside it."""

    create_s: float
    """t_cc: its process."""
    context_s: float
    """t_cu: the context of its device."""
    libraries_s: float
    """t_l: what it imports, while parameters are loaded."""

    @property
    def before_load_s(self) -> float:
        """Until the first byte can be loaded."""
        return self.create_s + self.context_s


WARM = StartTimes(create_s=0.0, context_s=0.0, libraries_s=0.0)
"""Of a worker that is up (design 6.1): it has its process, its context and its libraries."""
SEED_STARTS: Mapping[DeviceKind, StartTimes] = {
    DeviceKind.CPU: StartTimes(create_s=0.1, context_s=0.0, libraries_s=3.5),
    DeviceKind.CUDA: StartTimes(create_s=0.1, context_s=0.3, libraries_s=3.5),
    DeviceKind.SIM: WARM,
}
"""Of a bare process, by the figures of the first machines (design 12)."""
OPERATIONS_PER_BYTE: Mapping[DeviceKind, float] = {
    DeviceKind.CPU: 8.0,
    DeviceKind.CUDA: 130.0,
    DeviceKind.SIM: 130.0,
}
"""Operations of a long prompt in the time in which the device reads one byte of its memory."""

LONG_PROMPT_TOKENS = 128
"""From here on a prompt shows how fast a device computes; a shorter one what a step takes anyway,
of which a rate would say that long prompts take for ever.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Rates of one node's devices of one kind, measured beside its start; 0: not measured."""

    node_id: NodeId
    device_kind: DeviceKind
    load_bytes_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSample:
    """What one stage of one start showed. None where it shows nothing."""

    model: ModelName
    device_kind: DeviceKind
    node_id: NodeId
    create_s: float | None = None
    context_s: float | None = None
    libraries_s: float | None = None
    init_s: float | None = None
    restore_s: float | None = None
    load_bytes_per_s: float | None = None
    source: str = ""
    """Where its parameters came from: a node, or what the model was registered from."""
    fetch_bytes_per_s: float | None = None
    """Of the link between source and node, all fetches together."""
    prefill: Point | None = None
    """Tokens, and seconds for all layers."""
    operations_per_s: float | None = None
    """Of the prompt (``prompt_operations``)."""
    overhead_s: float | None = None
    """Beside what the stage did: planning, commands, the way of the request and of its token."""
    decode: Point | None = None
    """Bytes that a step reads (``step_bytes``), and seconds for all layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopSample:
    """Activations went from one node to another."""

    first: NodeId
    second: NodeId
    hop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OfModel:
    """Learned of one model on one kind of device."""

    init: Mean | None = None
    restore: Mean | None = None
    prefill: Line = NO_LINE
    decode: Line = NO_LINE
    profiled_restore_s: float = 0.0
    """What was taken over for ``restore``: not again once a start was not restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfDevice:
    """Learned of one kind of device on one node, or on all."""

    create: Mean | None = None
    context: Mean | None = None
    libraries: Mean | None = None
    load: Mean | None = None
    """Bytes a second from the host pool to the device."""
    compute: Mean | None = None
    """Operations a second of prompts, whatever the model."""
    overhead: Mean | None = None
    """Of a start, beside what its stages do."""
    probe: Probe | None = None


UNKNOWN_DEVICE = OfDevice()
UNKNOWN_MODEL = OfModel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """All that was learned. Immutable: ``learned`` gives the next one."""

    models: Mapping[tuple[ModelName, DeviceKind], OfModel] = field(
        default_factory=dict[tuple[ModelName, DeviceKind], OfModel]
    )
    devices: Mapping[tuple[NodeId, DeviceKind], OfDevice] = field(
        default_factory=dict[tuple[NodeId, DeviceKind], OfDevice]
    )
    """Under ``ANY`` over all nodes."""
    rates: Mapping[tuple[NodeId, str], Mean] = field(default_factory=dict[tuple[NodeId, str], Mean])
    """Bytes a second by node and source; under ``ANY`` or ``ANY_SOURCE`` over all of one side."""
    hops: Mapping[tuple[NodeId, NodeId], Mean] = field(
        default_factory=dict[tuple[NodeId, NodeId], Mean]
    )
    """By pair of nodes, the lesser id first; under ``(ANY, ANY)`` over all."""

    def learned(
        self,
        samples: Iterable[StageSample] = (),
        hops: Iterable[HopSample] = (),
        probes: Iterable[Probe] = (),
    ) -> "Timings":
        """With more samples; what is not sampled stays as it is."""
        models, devices = dict(self.models), dict(self.devices)
        rates, pairs = dict(self.rates), dict(self.hops)
        for probe in probes:
            for node_id in (probe.node_id, ANY):
                key = (node_id, probe.device_kind)
                devices[key] = replace(devices.get(key, UNKNOWN_DEVICE), probe=probe)
        for sample in samples:
            # What a sample says nothing of stays the same object: it is not written again.
            of_model = (sample.model, sample.device_kind)
            model = models.get(of_model, UNKNOWN_MODEL)
            if (of_it := _model_after(model, sample)) != model:
                models[of_model] = of_it
            for node_id in (sample.node_id, ANY):
                key = (node_id, sample.device_kind)
                device = devices.get(key, UNKNOWN_DEVICE)
                if (of_this := _device_after(device, sample)) != device:
                    devices[key] = of_this
            ends = ((sample.node_id, sample.source), (sample.node_id, ANY_SOURCE))
            for end in (*ends, (ANY, sample.source)):
                rate = mean_after(rates.get(end), sample.fetch_bytes_per_s or None, of_rates=True)
                if rate is not None:
                    rates[end] = rate
        for hop in hops:
            for pair in (_pair(hop.first, hop.second), (ANY, ANY)):
                mean = mean_after(pairs.get(pair), hop.hop_s)
                if mean is not None:
                    pairs[pair] = mean
        return Timings(models=models, devices=devices, rates=rates, hops=pairs)

    def start_times(self, node_id: NodeId, kind: DeviceKind) -> StartTimes:
        """t_cc, t_cu and t_l of a bare process on a node."""
        here, anywhere, seed = *self._of_device(node_id, kind), SEED_STARTS[kind]
        return StartTimes(
            create_s=_first(here.create, anywhere.create, seed.create_s),
            context_s=_first(here.context, anywhere.context, seed.context_s),
            libraries_s=_first(here.libraries, anywhere.libraries, seed.libraries_s),
        )

    def load_bytes_per_s(self, node_id: NodeId, kind: DeviceKind, reported: float) -> float:
        """p: from the host pool to a device, for which the node reports a rate of its own."""
        here, anywhere = self._of_device(node_id, kind)
        probed = here.probe.load_bytes_per_s if here.probe is not None else 0.0
        if here.load is not None:
            return here.load.value
        return probed or reported or _first(anywhere.load, None, 0.0)

    def memory_bytes_per_s(self, node_id: NodeId, kind: DeviceKind, reported: float) -> float:
        """What a device reads of its own memory; without a probe what it is filled with, which is
        less: the most that is known of that, since starts fill it beside other work.
        """
        here, anywhere = self._of_device(node_id, kind)
        for probe in (here.probe, anywhere.probe):
            if probe is not None and probe.memory_bytes_per_s > 0:
                return probe.memory_bytes_per_s
        return max(reported, self.load_bytes_per_s(node_id, kind, reported))

    def fetch_bytes_per_s(self, node_id: NodeId, source: str, link_bytes_per_s: float) -> float:
        """b: what a node gets of a source when it fetches alone.

        1. what it got of this source
        2. what other nodes got of it and a little more, no more than the node's link
        3. what the node got of other sources, no more than its link; its link
        """
        exact = self.rates.get((node_id, source))
        if exact is not None:  # 1
            return exact.value
        source_end = self.rates.get((ANY, source))
        if source_end is not None:  # 2
            return min(link_bytes_per_s, UNTRIED * source_end.value)
        node_end = self.rates.get((node_id, ANY_SOURCE))  # 3
        return min(link_bytes_per_s, _first(node_end, None, link_bytes_per_s))

    def slowness(self, node_id: NodeId, link_bytes_per_s: float) -> int:
        """How far below its link a node's fetches stayed, as a power of two; 0 where none did."""
        known = self.rates.get((node_id, ANY_SOURCE))
        if known is None or known.value <= 0 or link_bytes_per_s <= known.value:
            return 0
        return round(math.log2(link_bytes_per_s / known.value))

    def lags(self, node_id: NodeId, source: str) -> bool:
        """Whether a node gets less than half of what others get of a source: its own link is slow,
        whatever it reports.
        """
        here, anywhere = self.rates.get((node_id, source)), self.rates.get((ANY, source))
        return here is not None and anywhere is not None and 2 * here.value < anywhere.value

    def hop_s(self, first: NodeId, second: NodeId) -> float:
        """t_n between two nodes."""
        return _first(self.hops.get(_pair(first, second)), self.hops.get((ANY, ANY)), HOP_S)

    def ring_hop_s(self, nodes: Sequence[NodeId]) -> float:
        """t_n of a group: the mean over its hops from stage to stage, and back to the first; of no
        nodes, over all that were seen.
        """
        around = list(zip(nodes, (*nodes[1:], *nodes[:1]), strict=True)) or [(ANY, ANY)]
        return sum(self.hop_s(first, second) for first, second in around) / len(around)

    def restores(self, model: ModelName, kind: DeviceKind) -> bool:
        """Whether the model's last start was restored from an artifact."""
        return self.models.get((model, kind), UNKNOWN_MODEL).restore is not None

    def init_s(self, model: ModelName, kind: DeviceKind) -> float:
        """What a model's engine takes beside its parameters, or its artifact's restore in place of
        that, where its last start was restored.
        """
        known = self.models.get((model, kind), UNKNOWN_MODEL)
        return _first(known.restore, known.init, 0.0)

    def overhead_s(self, kind: DeviceKind) -> float:
        """What a start takes beside what its stages do, on all nodes."""
        return _first(self.devices.get((ANY, kind), UNKNOWN_DEVICE).overhead, None, 0.0)

    def prefill_s(self, model: Model, kind: DeviceKind, memory_rate: float, tokens: int) -> float:
        """t_p of all layers.

        Args:
            model: Which.
            kind: Of the device.
            memory_rate: Bytes a second that the device reads of its memory, for the seed.
            tokens: Of the prompt.
        """
        parameters = model.device_bytes(model.spec.whole)
        compute = self.devices.get((ANY, kind), UNKNOWN_DEVICE).compute
        line = self.models.get((model.name, kind), UNKNOWN_MODEL).prefill
        if compute is not None:
            shown = [Point(x, prompt_operations(model, x) / compute.value) for x in (1.0, 2048.0)]
            return line.at(tokens, (shown[0], shown[1]))
        rate = OPERATIONS_PER_BYTE[kind] * memory_rate
        reading_s = transfer_s(parameters, memory_rate)
        seed = (
            Point(1.0, reading_s),
            Point(2048.0, reading_s + transfer_s(prompt_operations(model, 2047), rate)),
        )
        return line.at(tokens, seed) if memory_rate > 0 else seed[0].y

    def decode_s(
        self, model: Model, kind: DeviceKind, memory_rate: float, batch: int, context_tokens: int
    ) -> float:
        """t_d of all layers: one token for each request of a batch.

        Args:
            model: Which.
            kind: Of the device.
            memory_rate: Bytes a second that the device reads of its memory, for the seed.
            batch: Requests.
            context_tokens: Of each of them.
        """
        least = float(max(1, step_bytes(model, 0, 0)))
        seed = tuple(Point(x, transfer_s(x, memory_rate)) for x in (least, 2 * least))
        line = self.models.get((model.name, kind), UNKNOWN_MODEL).decode
        if memory_rate <= 0:
            return seed[0].y
        return line.at(step_bytes(model, batch, context_tokens), (seed[0], seed[1]))

    def _of_device(self, node_id: NodeId, kind: DeviceKind) -> tuple[OfDevice, OfDevice]:
        """On one node, and on all."""
        return (
            self.devices.get((node_id, kind), UNKNOWN_DEVICE),
            self.devices.get((ANY, kind), UNKNOWN_DEVICE),
        )


def prompt_operations(model: Model, tokens: float) -> float:
    """Of a prompt through all layers: a multiplication and an addition for each parameter and
    token.
    """
    return 2 * model.device_bytes(model.spec.whole) / model.dtype.size_bytes * tokens


def step_bytes(model: Model, batch: int, context_tokens: int, stage: Stage | None = None) -> int:
    """Bytes of device memory that one decode step reads: parameters, and each request's keys and
    values.

    Args:
        model: Which.
        batch: Requests.
        context_tokens: Of each of them.
        stage: The layers; None: all.
    """
    layers = model.spec.whole if stage is None else stage
    kv_bytes = model.spec.kv_bytes_per_token(layers, model.dtype)
    return model.device_bytes(layers) + batch * context_tokens * kv_bytes


def _pair(first: NodeId, second: NodeId) -> tuple[NodeId, NodeId]:
    return (first, second) if first <= second else (second, first)


def _first(one: Mean | None, other: Mean | None, seed: float) -> float:
    known = one if one is not None else other
    return seed if known is None else known.value


def _model_after(known: OfModel, sample: StageSample) -> OfModel:
    # A start that was not restored says that there is no artifact any more.
    anew = sample.init_s is not None and sample.restore_s is None
    return replace(
        known,
        init=mean_after(known.init, sample.init_s),
        restore=None if anew else mean_after(known.restore, sample.restore_s),
        prefill=known.prefill if sample.prefill is None else known.prefill.after(sample.prefill),
        decode=known.decode if sample.decode is None else known.decode.after(sample.decode),
    )


def _device_after(known: OfDevice, sample: StageSample) -> OfDevice:
    return OfDevice(
        create=mean_after(known.create, sample.create_s),
        context=mean_after(known.context, sample.context_s),
        libraries=mean_after(known.libraries, sample.libraries_s),
        load=mean_after(known.load, sample.load_bytes_per_s or None, of_rates=True),
        compute=mean_after(known.compute, sample.operations_per_s or None, of_rates=True),
        overhead=mean_after(known.overhead, sample.overhead_s),
        probe=known.probe,
    )
