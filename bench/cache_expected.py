"""What ``cache_real.py`` expects of a policy: its trace on the simulated cluster.

The simulator runs the scheduler's own tick and the eviction policies, told as the cache tells them:
arrivals as gateways do, a minimum residency, service that is owed, loads that take time, several
requests that wait for one of them, and room that is granted to instances as on the real device.
Models are the demo model as its checkpoint says, so grants are those of the real system.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pilotlight.checkpoint.checkpoint import read_checkpoint
from pilotlight.checkpoint.reader import FolderSource
from pilotlight.cli.demo_model import demo_model_folder
from pilotlight.policy.cost import stage_room
from pilotlight.policy.ids import ModelName
from pilotlight.policy.model import Dtype, ModelSpec, ScalingBounds
from pilotlight.sim.cache.workload import TimedRequest
from pilotlight.sim.cluster.build import Catalogue, catalogue_of
from pilotlight.sim.cluster.engine import Request
from pilotlight.sim.cluster.run import Simulation
from pilotlight.sim.cluster.scenario import (
    GIB,
    Application,
    Contender,
    Family,
    NodeKind,
    Scenario,
)

LOADS_S = (0.2, 0.3, 0.4, 0.5, 0.6)
"""A start of the demo model on two cores takes 0.2 to 0.6 s."""
ANSWER_S = 0.1
PROMPT_TOKENS = 20
PREFILL_TOKENS_PER_S = 1_000.0
KEEP_ALIVE_S = ScalingBounds().keep_alive_s
"""As models are registered by default."""
FAMILY = "ember"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A trace, and the device that it meets."""

    models: Sequence[ModelName]
    room: int
    requests: Sequence[TimedRequest]
    max_tokens: int
    slo_ms: float


def demo_spec() -> tuple[ModelSpec, Dtype]:
    """The demo model, as registration reads it."""
    read = read_checkpoint(FolderSource(demo_model_folder()))
    return read.spec, read.run_dtype


def device_bytes(room: int) -> int:
    """Of a device with places for so many demo models, and no more.

    An instance is granted more than the least where there is more: as long as devices are not full,
    they hold fewer models than this. What has to make room is granted the least alone, so after the
    first evictions there are as many as fit.
    """
    one = Asked(models=(), room=room, requests=(), max_tokens=1, slo_ms=1.0)
    model = next(iter(_catalogue(_scenario(one)).models.values()))
    return room * stage_room(model, model.spec.whole).least_bytes


def expected_reloads(
    asked: Asked, policy: str, loads_s: Sequence[float] = LOADS_S
) -> tuple[int, ...]:
    """Reloads with loads that take so long, each.

    Args:
        asked: The trace.
        policy: By its name in ``eviction.choice``.
        loads_s: Seconds.
    """
    return tuple(_reloads(asked, policy, load_s) for load_s in loads_s)


def _reloads(asked: Asked, policy: str, load_s: float) -> int:
    scenario = _scenario(asked)
    catalogue = _catalogue(scenario)
    model = next(iter(catalogue.models.values()))
    loaded_gib = model.device_bytes(model.spec.whole) / GIB
    node = replace(
        scenario.nodes[0],
        device_gib=device_bytes(asked.room) / GIB,
        load_gib_per_s=loaded_gib / load_s,
    )
    names = dict(zip(asked.models, catalogue.models, strict=True))
    simulation = Simulation(
        replace(scenario, nodes=(node,)),
        Contender(name=policy, start=None, cache=True, created=True, warm=True, eviction=policy),
        seed=0,
        catalogue=catalogue,
        asked=[
            Request(names[one.model], one.time_s, PROMPT_TOKENS, asked.max_tokens)
            for one in asked.requests
        ],
    )
    simulation.run()
    first_loads = len({one.model for one in asked.requests})
    return simulation.leader.starts - first_loads


def _catalogue(scenario: Scenario) -> Catalogue:
    spec, dtype = demo_spec()
    made = catalogue_of(scenario)
    models = {name: replace(one, spec=spec, dtype=dtype) for name, one in made.models.items()}
    return replace(made, models=models)


def _scenario(asked: Asked) -> Scenario:
    """One node with one device; figures of the family that the checkpoint has are not used."""
    return Scenario(
        name="cache-real",
        nodes=(
            NodeKind(
                name="node",
                count=1,
                devices=1,
                device_gib=1.0,
                memory_gib=16.0,
                network_gbit_per_s=100.0,
                load_gib_per_s=1.0,
                memory_gib_per_s=10.0,
            ),
        ),
        families=(
            Family(
                name=FAMILY,
                size_gib=1.0,
                layers=1,
                hidden_size=128,
                kv_heads=1,
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
                decode_step_s=ANSWER_S / asked.max_tokens,
                decode_more_s=0.0,
            ),
        ),
        applications=(
            Application(
                name=FAMILY,
                family=FAMILY,
                models=max(1, len(asked.models)),
                ttft_s=asked.slo_ms / 1000,
                tpot_s=1.0,
                prompt_tokens=PROMPT_TOKENS,
                output_tokens=asked.max_tokens,
                max_instances=1,
            ),
        ),
        keep_alive_s=KEEP_ALIVE_S,
    )
