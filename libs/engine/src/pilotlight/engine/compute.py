"""What runs and samples a stage, by the device that its arena is on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.device.arena_protocol import Scratch
from pilotlight.engine.device.encoder_runner import EncoderRunner, tell_finite
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.device.runner import RangeRunner
from pilotlight.engine.device.sampler import NotSampled, PendingTokens, SampledToken, sample
from pilotlight.engine.models.encoder import Encoder
from pilotlight.policy.model import Stage

if TYPE_CHECKING:
    from pilotlight.engine.cuda.graphs import GraphSet, GraphSupplier, HasSteps
    from pilotlight.engine.cuda.idle import Prepares

Sampler = Callable[[Tensor, Sequence[SampleSpec]], "list[SampledToken | NotSampled]"]
"""Samples one token from each row of logits; see ``device.sampler.sample``."""


class Runner(Protocol):
    """Runs layer ranges; see ``device.runner.RangeRunner``."""

    def run(self, batch: Batch, inputs: Tensor, layers: Stage | None = None) -> Tensor:
        """See ``RangeRunner.run``. Logits may be overwritten by the next run."""
        ...


Launcher = Callable[[Tensor, Sequence[SampleSpec]], PendingTokens]
"""The same for specs that are all simple, without waiting for the device."""


def _nothing() -> None:
    pass


def _nothing_of(requests: int) -> None:
    pass


def _in_pieces(tokens: int) -> bool:
    return False


def _directly(run: Callable[[], Tensor]) -> Tensor:
    return run()


def _in_pool_of(memory: StageMemory) -> Callable[[Callable[[], Tensor]], Tensor]:
    """Runs what takes memory on a CUDA device."""
    from pilotlight.engine.cuda.pools import run_in

    scratch = memory.scratch()
    assert scratch is not None, "an arena on a CUDA device has scratch memory"
    return partial(run_in, scratch.eager)


@dataclass(frozen=True, slots=True)
class Compute:
    """A stage's executor and its sampler."""

    runner: Runner
    """Takes token ids from the device, too, if there is a ``launch``."""
    sample: Sampler
    launch: Launcher | None = None
    """None where the host does the work itself: there is nothing to run ahead of."""
    expect: Callable[[int], bool] = _in_pieces
    """See ``GraphSupplier.expect``."""
    extended: Callable[[], None] = _nothing
    """See ``GraphSupplier.extended``."""
    rehearse: Callable[[], None] = _nothing
    """Does once, on nothing of any request, what would take longer at its first use."""
    arriving: Callable[[int], None] = _nothing_of
    """See ``GraphSupplier.arriving``."""
    close: Callable[[], None] = _nothing
    """Gives back what it holds beside the stage's memory, before that goes."""
    ahead: "tuple[Prepares, ...]" = ()
    """What can be done for later while nothing runs; what comes first is done first."""


class GraphPlan(Protocol):
    """What is to become of a stage's graphs, if they are not only captured as they are used."""

    def supplier(self, memory: StageMemory, scratch: Scratch) -> "GraphSupplier":
        """What gives the stage its graphs; called once, before there are any steps.

        Args:
            memory: the stage's.
            scratch: the slot's.
        """
        ...

    def begin(self, stage: "HasSteps", graphs: "GraphSet") -> None:
        """The stage has its steps; called once."""
        ...


def compute_on(
    memory: StageMemory,
    parameters: Parameters,
    kv: KvCache,
    plan: GraphPlan | None = None,
) -> Compute:
    """What a stage needs on the device that its memory is on.

    Args:
        memory: the stage's.
        parameters: the stage's.
        kv: the stage's.
        plan: for the stage's graphs, where the device has any. None: they are captured as they are
            used.

    Raises:
        UnsupportedModel: the device does not run the stage's dtype.
        NoRoom: it has no memory for what captured steps read and write.
    """
    device, decoder = memory.arena.device, memory.decoder
    if isinstance(decoder, Encoder):
        within = _directly if device.type == "cpu" else _in_pool_of(memory)
        return Compute(EncoderRunner(memory, parameters, decoder, within), tell_finite)
    if device.type == "cpu":
        return Compute(RangeRunner(memory, parameters, kv), sample)
    # Only here: on a machine without a GPU there may be no triton.
    from pilotlight.engine.cuda.capture import CaptureOnSecondUse, keep_generator_memory
    from pilotlight.engine.cuda.graphs import GraphSet
    from pilotlight.engine.cuda.idle import CaptureAhead
    from pilotlight.engine.cuda.rehearsal import Rehearsal
    from pilotlight.engine.cuda.runner import CudaRangeRunner
    from pilotlight.engine.cuda.sampler import CudaSampler

    keep_generator_memory(device)
    scratch = memory.scratch()
    assert scratch is not None, "an arena on a CUDA device has scratch memory"
    supplier = (
        CaptureOnSecondUse(device, scratch) if plan is None else plan.supplier(memory, scratch)
    )
    graphs = GraphSet(device, scratch, supplier)
    try:
        runner = CudaRangeRunner(memory, parameters, kv, scratch.eager, graphs=graphs)
        if plan is not None:
            plan.begin(runner, graphs)
    except BaseException:
        graphs.close()
        raise
    sampler = CudaSampler(memory.decoder.spec.vocab_size, device)
    rehearsal = Rehearsal(memory, sampler, runner)

    def launch(logits: Tensor, specs: Sequence[SampleSpec]) -> PendingTokens:
        tokens = sampler.launch(logits, specs)
        supplier.sampled()
        return tokens

    # What an artifact brings comes by itself, and what is recorded is recorded in its order.
    arena = memory.arena
    ahead = CaptureAhead(runner.steps_of(), graphs, lambda: arena.spare_bytes)
    first = (runner.kernels_ahead, ahead) if plan is None else ()
    lengths = (runner.whole_prompts,) if runner.whole_prompts is not None else ()
    return Compute(
        runner,
        sampler,
        launch,
        supplier.expect,
        supplier.extended,
        rehearsal,
        supplier.arriving,
        graphs.close,
        (*first, *lengths),
    )
