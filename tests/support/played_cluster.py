"""A dashboard on a cluster that is played: what it shows is known to the last figure."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

from pilotlight.common.service import Context
from pilotlight.gateway.edge.server import HttpServer
from pilotlight.gateway.serving.fleet import Fleet, Seen, StartProgress
from pilotlight.gateway.settings import GatewaySettings
from pilotlight.gateway.ui.testing import ui_world
from pilotlight.policy.cluster import PEER_LINK, HeldStage, LinkSpeed, OriginKind
from pilotlight.policy.ids import ModelName, NodeId, WorkerId
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.testing import held, instance, model, node, worker

GIB = 1 << 30
DEVICE_BYTES = 80 * GIB
LAYERS = 4
HELD_GIB = (15, 27, 8, 40, 5)
"""Of models on devices, one after the other."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many there are of each."""

    nodes: int
    models: int
    devices: int
    """Of each node."""
    groups: int


class PlayedCluster:
    """Facts of a cluster of any size, all of which change with each step and with nothing else."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.step = 0
        self._models = {
            name: SimpleNamespace(model=replace(_model(number), name=ModelName(name)))
            for number in range(size.models)
            for name in (f"org-{number % 50}/model-{number:04d}",)
        }
        self._names = sorted(self._models)

    def nodes(self) -> tuple[Any, ...]:
        return tuple(
            replace(
                node(),
                node_id=NodeId(f"node-{number:04d}"),
                host=f"host-{number:04d}",
                pool_bytes=1 << 38,
                pool_free_bytes=(1 << 37) + self.step,
                links=(
                    LinkSpeed(
                        kind=OriginKind.PEER,
                        name=f"{PEER_LINK}node-{(number + 1) % self.size.nodes:04d}",
                        bytes_per_s=float((1 << 30) + self.step),
                    ),
                ),
            )
            for number in range(self.size.nodes)
        )

    def workers(self) -> tuple[Any, ...]:
        return tuple(
            replace(
                worker(0, memory_bytes=DEVICE_BYTES),
                worker_id=WorkerId(f"node-{number:04d}-w{device}"),
                node_id=NodeId(f"node-{number:04d}"),
                held=self._held(number * self.size.devices + device),
                running_requests=(number + self.step) % 50,
            )
            for number in range(self.size.nodes)
            for device in range(self.size.devices)
        )

    def instances(self, name: ModelName | None = None) -> tuple[Seen, ...]:
        if name is None:
            return tuple(self._group(number) for number in range(self.size.groups))
        serving = Seen(replace(instance(), model=name), 1.0)
        return (serving,) if self.step % 2 else ()

    def _held(self, device: int) -> tuple[HeldStage, ...]:
        """Two models on every third device, one on the others."""
        first = device % len(self._names)
        numbers = (first, (first + 5) % len(self._names)) if device % 3 == 0 else (first,)
        return tuple(
            replace(
                held(self._names[number], device_bytes=HELD_GIB[number % 5] * GIB),
                in_flight=self.step % 7,
            )
            for number in numbers
        )

    def _group(self, number: int) -> Seen:
        one = instance(self._names[number], f"inst-{number:04d}", in_flight=self.step)
        (lead,) = one.placements
        stages = (replace(lead, stage=Stage(0, 2)), replace(lead, stage=Stage(2, 4)))
        return Seen(replace(one, placements=stages), 1.0)

    def failed_start(self, name: ModelName, digest: Any) -> None:
        return None

    def progress(self, name: ModelName, digest: Any) -> StartProgress:
        return StartProgress(phase="fetch", fetched=0.5)

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def get(self, name: str) -> Any:
        return self._models.get(name)


def _model(number: int) -> Model:
    return model(part_bytes=HELD_GIB[number % 5] * GIB // (LAYERS + 2))


@asynccontextmanager
async def shown(cluster: PlayedCluster, context: Context[GatewaySettings]) -> AsyncIterator[str]:
    """The address of a gateway whose dashboard shows the cluster."""
    async with ui_world(context, cast(Fleet, cluster)) as world:
        live = world.admin.parts.live
        live._fleet = live._models = cluster
        server = HttpServer(
            world.edge, lambda _: None, context.background, host="127.0.0.1", port=0, drain_s=0.1
        )
        await server.start()
        yield f"http://127.0.0.1:{server.port}"
        await live.stop()
        await server.stop()
