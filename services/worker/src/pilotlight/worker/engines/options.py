"""How a worker's settings have its engine's process started."""

import os

from pilotlight.common.ids import worker_id_of
from pilotlight.common.machine import log_file
from pilotlight.common.messages.graphs import GraphWays
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import NodeId, WorkerId
from pilotlight.worker.engines.child_command import ChildOptions, start_folder
from pilotlight.worker.settings import WorkerSettings


def worker_name(settings: WorkerSettings) -> WorkerId:
    """Of the one worker of a process."""
    return WorkerId(settings.worker_id or worker_id_of(NodeId(settings.node_id), 0))


def cuda_device(settings: WorkerSettings) -> str:
    """The engine and the driver's library are to mean the same device: the one counts what is
    shown, the other everything.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    return settings.cuda_device or shown


def child_options(settings: WorkerSettings, worker_id: WorkerId) -> ChildOptions:
    """Of the engine that serves."""
    device = cuda_device(settings)
    cores = len(os.sched_getaffinity(0)) // settings.workers
    return ChildOptions(
        threads=settings.threads or max(1, cores),
        log_path=log_file(settings.log_dir, f"engine-{worker_id}.log"),
        faults=settings.faults,
        log_level=settings.log_level,
        device=DeviceKind(settings.device),
        cuda_devices=(device,) if device else (),
        device_bytes=settings.device_bytes,
        step_tokens=settings.step_tokens,
        start=start_folder(settings.state_dir, worker_id),
    )


def graph_ways(settings: WorkerSettings) -> GraphWays:
    """How its engines record and restore graphs."""
    return GraphWays(pointers=settings.graph_pointers, kernels=settings.graph_kernels)
