"""From a scenario to the facts that control sees of it: models, nodes, what was learned."""

from collections.abc import Iterable
from dataclasses import dataclass

from pilotlight.policy.cluster import Device, DeviceKind
from pilotlight.policy.coldstart.decayed import Point
from pilotlight.policy.coldstart.timings import ANY, Probe, StageSample, Timings, step_bytes
from pilotlight.policy.cost import EngineSpeed
from pilotlight.policy.ids import Digest, ModelName, NodeId, WorkerId
from pilotlight.policy.model import Dtype, Model, ModelSpec, ScalingBounds, Slo
from pilotlight.sim.cluster.arrivals import model_name
from pilotlight.sim.cluster.engine import Pace
from pilotlight.sim.cluster.scenario import (
    GIB,
    Application,
    Contender,
    Family,
    NodeKind,
    Scenario,
    StartUp,
)

REMOTE = "s3://models"
LEARNED = 4
"""How often each point was seen: estimates are those of a cluster that has run for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Models, with what their scenario says of them."""

    models: dict[ModelName, Model]
    applications: dict[ModelName, Application]
    paces: dict[ModelName, Pace]
    """Of a whole instance."""


def catalogue_of(scenario: Scenario) -> Catalogue:
    """All models of a scenario."""
    made = Catalogue(models={}, applications={}, paces={})
    for application in scenario.applications:
        family = scenario.family(application.family)
        spec = _spec(family)
        for number in range(application.models):
            name = model_name(application, number)
            made.applications[name] = application
            made.paces[name] = pace_of(family)
            made.models[name] = Model(
                name=name,
                uri=f"{REMOTE}/{name}",
                revision=None,
                source_version="1",
                digest=Digest(f"digest of {name}"),
                text_digest=Digest("text"),
                dtype=Dtype.FLOAT16,
                spec=spec,
                slo=Slo(
                    ttft_ms=1000 * application.ttft_s * scenario.slo_scale,
                    tpot_ms=1000 * application.tpot_s * scenario.slo_scale,
                ),
                scaling=ScalingBounds(
                    max_instances=application.max_instances, keep_alive_s=scenario.keep_alive_s
                ),
            )
    return made


def pace_of(family: Family) -> Pace:
    """What a whole instance takes for its work."""
    return Pace(
        speed=EngineSpeed(
            load_bytes_per_s=0.0,
            prefill_tokens_per_s=family.prefill_tokens_per_s,
            decode_step_s=family.decode_step_s,
        ),
        decode_more_s=family.decode_more_s,
    )


def start_up_of(scenario: Scenario, contender: Contender) -> StartUp:
    """What a contender's workers take beside parameters."""
    times = scenario.start_up
    return StartUp(
        create_s=0.0 if contender.created or contender.warm else times.create_s,
        context_s=0.0 if contender.warm else times.context_s,
        libraries_s=0.0 if contender.warm else times.libraries_s,
    )


def timings_of(scenario: Scenario, contender: Contender, catalogue: Catalogue) -> Timings:
    """What a cluster that has run for a while has learned."""
    start_up = start_up_of(scenario, contender)
    kind = DeviceKind.CUDA
    samples = [
        StageSample(
            model=ModelName(""),
            device_kind=kind,
            node_id=ANY,
            create_s=start_up.create_s,
            context_s=start_up.context_s,
            libraries_s=start_up.libraries_s,
        )
    ]
    for name, model in catalogue.models.items():
        pace = catalogue.paces[name]
        prefills = [Point(tokens, pace.step_s(1, tokens)) for tokens in (128, 2048)]
        decodes = [
            Point(step_bytes(model, batch, 1024), pace.step_s(batch))
            for batch in (1, scenario.max_batch)
        ]
        samples += [
            StageSample(model=name, device_kind=kind, node_id=ANY, prefill=prefill, decode=decode)
            for prefill, decode in zip(prefills, decodes, strict=True)
        ] * LEARNED
    probes = (
        Probe(
            node_id=node_id,
            device_kind=kind,
            memory_bytes_per_s=node.memory_gib_per_s * GIB,
        )
        for node, node_id in nodes_of(scenario)
    )
    return Timings().learned(samples, probes=probes)


def nodes_of(scenario: Scenario) -> Iterable[tuple[NodeKind, NodeId]]:
    """All nodes, by name."""
    for kind in scenario.nodes:
        for number in range(kind.count):
            yield kind, NodeId(f"{kind.name}-{number:04d}")


def workers_of(kind: NodeKind, node_id: NodeId) -> Iterable[tuple[WorkerId, Device]]:
    """A node's workers, each with a device."""
    for number in range(kind.devices):
        yield (
            WorkerId(f"{node_id}-{number}"),
            Device(
                kind=DeviceKind.CUDA,
                name=kind.name,
                memory_bytes=int(kind.device_gib * GIB),
                load_bytes_per_s=kind.load_gib_per_s * GIB,
            ),
        )


def _spec(family: Family) -> ModelSpec:
    """Embedding and head by the vocabulary; the rest is spread over the layers evenly."""
    edge = 2 * family.vocab_size * family.hidden_size
    layer = (int(family.size_gib * GIB) - 2 * edge) // family.layers
    return ModelSpec(
        architecture="LlamaForCausalLM",
        dtype=Dtype.FLOAT16,
        num_layers=family.layers,
        hidden_size=family.hidden_size,
        intermediate_size=4 * family.hidden_size,
        num_heads=family.hidden_size // family.head_dim,
        num_kv_heads=family.kv_heads,
        head_dim=family.head_dim,
        vocab_size=family.vocab_size,
        max_context_tokens=4096,
        rope_theta=10_000.0,
        rope_scaling=None,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
        attention_bias=False,
        part_bytes=(edge, *(layer,) * family.layers, edge),
    )
