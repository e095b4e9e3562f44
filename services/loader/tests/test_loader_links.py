"""Loaders that give each other models: real processes, as nodes of one cluster."""

import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from gated_link import GatedLink
from loader_processes import MIB, LoaderProcesses, fetch_of

from pilotlight.checkpoint.testing import tiny_config, tiny_files
from pilotlight.common.bus import Bus
from pilotlight.common.settings import BusSettings
from pilotlight.common.testing import until
from pilotlight.policy.model import Model

pytestmark = pytest.mark.anyio

PATIENT = {"PILOTLIGHT_STALL_TIMEOUT_S": "20.0"}
"""For nodes that have nobody else to ask: on a busy machine others are silent for seconds, above
all while they start.
"""


@pytest.fixture
async def cluster(
    tmp_path: Path, bus: Bus, bus_settings: BusSettings
) -> AsyncIterator[LoaderProcesses]:
    built = LoaderProcesses(tmp_path, bus, bus_settings)
    await built.listen()
    yield built
    await built.stop()


def register(cluster: LoaderProcesses) -> Model:
    """24 MiB, with layers of several chunks."""
    return cluster.register(
        tiny_files(
            tiny_config(
                hidden_size=512, intermediate_size=4096, vocab_size=512, num_hidden_layers=2
            )
        )
    )


async def test_nodes_meet_and_pass_a_model_on(cluster: LoaderProcesses) -> None:
    model = register(cluster)
    first, second, third = [
        await cluster.start(name, **PATIENT) for name in ("first", "second", "third")
    ]
    # Before any word of a model: they have met.
    for loader in (first, second, third):
        await until(lambda loader=loader: len(loader.said("link_up")) == 2)
    await cluster.order(first, fetch_of(first, model))
    await cluster.has(first, model)
    # The folder is gone: what the others get, they get from one another.
    (cluster.folder / "models" / "m").rename(cluster.folder / "models" / "gone")
    await cluster.order(third, fetch_of(third, model, cluster.peer(second), cluster.peer(first)))
    await cluster.order(second, fetch_of(second, model, cluster.peer(first)))
    await cluster.has(second, model)
    await cluster.has(third, model)
    assert not third.said("origin_set_aside")


@pytest.mark.parametrize(("does", "seed"), [("dies", 1), ("dies", 2), ("hangs", 3), ("hangs", 4)])
async def test_a_node_whose_upstream_dies_or_hangs_goes_on_at_the_byte(
    cluster: LoaderProcesses, does: str, seed: int
) -> None:
    model = register(cluster)
    first, second = await cluster.start("first"), await cluster.start("second")
    await cluster.order(first, fetch_of(first, model))
    await cluster.has(first, model)
    gate = GatedLink(random.Random(seed).randrange(MIB, 24 * MIB))
    behind = await gate.start(cluster.peer(first))
    await cluster.order(second, fetch_of(second, model, behind))
    await until(lambda: gate.is_held_up)
    first.signal(signal.SIGKILL if does == "dies" else signal.SIGSTOP)
    # A connection to a node that hangs passes nothing on.
    if does == "dies":
        gate.open()
    await cluster.has(second, model)
    named = second.said("origin_set_aside")
    assert len(named) == 1
    assert first.node_id in named[0]
    await gate.cut()


async def test_a_node_that_comes_back_elsewhere_is_met_again(cluster: LoaderProcesses) -> None:
    """A loader that is killed and starts again listens at another port: the others hear of it, and
    it gives what it has kept.
    """
    model = register(cluster)
    first, second = [await cluster.start(name, **PATIENT) for name in ("first", "second")]
    await cluster.order(first, fetch_of(first, model))
    await cluster.has(first, model)
    await until(lambda: second.said("link_up"))
    before = cluster.peer(first)
    first.signal(signal.SIGKILL)
    await first.ended()
    # It may have been met more than once: a busy machine breaks connections, too.
    met = len(second.said("link_up"))
    await cluster.begin(first)
    assert cluster.peer(first).port != before.port
    (cluster.folder / "models" / "m").rename(cluster.folder / "models" / "gone")
    await until(lambda: len(second.said("link_up")) > met)
    await cluster.order(second, fetch_of(second, model, cluster.peer(first)))
    await cluster.has(second, model)


async def test_nodes_of_two_clusters_have_nothing_to_say_to_each_other(
    cluster: LoaderProcesses,
) -> None:
    model = register(cluster)
    first, stranger = (
        await cluster.start("first"),
        await cluster.start("stranger", key="the key of another cluster"),
    )
    silent = await cluster.start("silent", key=None)
    await cluster.order(first, fetch_of(first, model))
    await cluster.has(first, model)
    facts = cluster.facts(silent)
    assert facts is not None
    assert (facts.dataplane_host, facts.dataplane_port) == ("", 0)
    await until(
        lambda: (
            first.said("link_down") and stranger.said("link_down") and first.said("link_refused")
        )
    )
    assert all(
        "peer_refused" in line for line in (*first.said("link_down"), *stranger.said("link_down"))
    )
    # Each takes the model from its source.
    await cluster.order(stranger, fetch_of(stranger, model, cluster.peer(first)))
    await cluster.has(stranger, model)
    assert not stranger.said("link_up")
