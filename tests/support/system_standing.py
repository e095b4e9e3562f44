"""What a small whole system that stands still is waiting for."""

from faulty_system import FaultySystem

from pilotlight.common.clock import SystemClock


def standing_of(system: FaultySystem) -> list[str]:
    """Where the requests are that have not ended, and what those are that they wait for."""
    serving, now_s = system.serving, SystemClock().monotonic_s()
    return [
        f"the gateway holds {serving.queue.held} and runs {serving.relay.running} requests",
        *(
            f"{one.request_id} attempt {one.number} on {one.instance_id}: accepted {one.accepted}, "
            f"token {one.log.next_seq}, gap {one.log.gap}, finish {one.finish}, error {one.error}, "
            f"heard of {now_s - one.heard_s:.1f} s ago"
            for one in serving.relay._attempts.values()
        ),
        *(
            f"the gateway sees {seen.instance.state} {seen.instance.instance_id} of {seen.instance.model}"
            for seen in serving.fleet.instances()
        ),
        *(
            f"{worker.core.worker_id}: engine alive {worker.core.engine.alive}, "
            f"{worker.core.table.running} run, stages "
            f"{[(one.hold.instance_id, str(one.state), one.reason) for one in worker.stages.held]}"
            for worker in system.workers
        ),
        *(
            f"{part.name}: connected {part.bus.connected}, broken off {part.bus.breaks} times"
            for part in system.parts.values()
        ),
    ]
