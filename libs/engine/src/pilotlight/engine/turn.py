"""A stage's turn: one batch of it, and what the step tells of all stages."""

from collections.abc import Callable, Collection, Sequence

from pilotlight.common.messages.engine import Produced
from pilotlight.engine.device.arena_protocol import Arena
from pilotlight.engine.errors import EngineError
from pilotlight.engine.faults import out_of_memory
from pilotlight.engine.pipeline_protocol import StageStep
from pilotlight.engine.resident import ResidentStage
from pilotlight.engine.results import GrownStage, LostPipeline, StepResult
from pilotlight.policy.ids import InstanceId


def run_batch(
    resident: ResidentStage, arena: Arena, monotonic_s: Callable[[], float], *, may_wait: bool
) -> StageStep:
    """One batch. Where the device has no memory for it, one of its requests ends in its place.

    Args:
        resident: the stage.
        arena: the device's.
        monotonic_s: the engine's clock, in seconds.
        may_wait: no other stage has work: this one may wait a moment for others of its pipeline, or
            start its next batch ahead.

    Raises:
        Exception: whatever else the device says; its context may be lost
            (``faults.context_lost``).
    """
    promises = resident.scheduler.promises
    began_s = monotonic_s() if promises.kept else 0.0
    try:
        done = resident.step(monotonic_s, may_wait=may_wait)
    except RuntimeError as error:
        relieved = resident.relieve() if out_of_memory(error) else StageStep()
        if not relieved.produced:
            raise
        arena.trim()
        return relieved
    if promises.kept and done.plan is not None:
        since_s = began_s if done.began_s is None else done.began_s
        promises.pace.ran(done.plan.batch, since_s, monotonic_s())
    return done


def step_result(
    stages: Collection[ResidentStage],
    resident: ResidentStage | None,
    done: StageStep,
    produced: Sequence[Produced],
    grown: Sequence[GrownStage],
    step_time_s: float,
) -> StepResult:
    """What a step tells.

    Args:
        stages: all that are held.
        resident: the one whose turn it was.
        done: what its batch gave.
        produced: that of the batch, and what ended beside it.
        grown: stages that have grown beside the batch.
        step_time_s: what it took.
    """
    plan = done.plan
    schedulers = [stage.scheduler for stage in stages]
    return StepResult(
        produced=tuple(produced),
        waiting=sum(scheduler.waiting for scheduler in schedulers),
        running=sum(scheduler.running for scheduler in schedulers),
        kv_free_tokens=sum(scheduler.kv_free_tokens for scheduler in schedulers),
        step_time_s=step_time_s,
        first_prefills=(done.first_prefill,) if done.first_prefill else (),
        kv_used_tokens=sum(scheduler.kv_used_tokens for scheduler in schedulers),
        kv_cached_tokens=sum(scheduler.kv_cached_tokens for scheduler in schedulers),
        batch_tokens=plan.batch.num_tokens if plan else 0,
        prefix_looked_up_tokens=plan.prefix_looked_up_tokens if plan else 0,
        prefix_hit_tokens=plan.prefix_hit_tokens if plan else 0,
        preemptions=plan.preempted if plan else 0,
        lost=(_lost(resident.instance_id, done.lost),) if resident and done.lost else (),
        left=(resident.instance_id,) if resident and done.left else (),
        grown=(*grown, resident.grown) if resident and done.grown else tuple(grown),
        unformed=(_lost(resident.instance_id, done.unformed),)
        if resident and done.unformed
        else (),
        hop_s=done.hop_s,
        turn_of=resident.instance_id if resident else None,
    )


def _lost(instance_id: InstanceId, error: EngineError) -> LostPipeline:
    return LostPipeline(instance_id=instance_id, code=error.code, message=error.message)
