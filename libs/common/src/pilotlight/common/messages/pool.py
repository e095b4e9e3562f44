"""Worker and loader, over the node's Unix socket: leases on the host pool.

A lease lives as long as its connection: the kernel's close frees it, so shared memory holds no
reference counts.
"""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.cluster import FetchPriority
from pilotlight.policy.ids import InstanceId, WorkerId
from pilotlight.policy.model import Dtype, Model
from pilotlight.policy.phase import Moment

RETURN_S = 5.0
"""A loader that took over a pool gives up nothing of it for so long: workers whose leases it does
not know of yet may be reading."""


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """A worker's first frame on its supervision connection; its death is this connection's
    close.
    """

    worker_id: WorkerId
    pid: int
    reports: bool = False
    """It gives its reports to its loader as soon as that says ``Relayed``."""


class WorkerSaid(Message, tag="said", frozen=True, kw_only=True):
    """A worker's report is another one now. For its loader to pass on as it is."""

    report: bytes
    """A ``WorkerReport`` in JSON."""
    seq: int
    """The report's."""


class WorkerHere(Message, tag="here", frozen=True, kw_only=True):
    """The worker runs, and its last report is still right."""


class Relayed(Message, tag="relayed", frozen=True, kw_only=True):
    """The loader speaks for the worker: its report, or that nothing has changed, was sent just
    now.
    """

    seq: int
    """Of that report; 0: it has none yet, and asks for one."""


class Lease(Message, tag="lease", frozen=True, kw_only=True):
    """A worker's first frame on a lease connection: keep these parts, fetch what is missing, tell
    me as each is verified.
    """

    worker_id: WorkerId
    instance_id: InstanceId
    model: Model
    parts: tuple[int, ...]
    trace_parent: str = ""
    priority: FetchPriority = FetchPriority.COLD_START
    """``PREFETCH`` where the instance serves without them."""


class TensorPlace(Message, array_like=True, frozen=True, kw_only=True):
    """Where a tensor lies in the pool."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class PartReady(Message, tag="ready", frozen=True, kw_only=True):
    """All chunks of a part are verified; its tensors may be read until the lease ends."""

    part: int
    tensors: tuple[TensorPlace, ...]
    ready: Moment | None = None
    """Since when it was, or, if that is longer ago, the lease's begin. None: of a release that does
    not say."""
    serial: int = 0
    """Of its image. Said again by a loader that took over the pool, another one says that the bytes
    are no longer the same ones. 0: of a release that does not say."""


class LeaseGranted(Message, tag="granted", frozen=True, kw_only=True):
    """Map this file read-only, whole.

    Parts follow as ``PartReady``, in execution order as far as the source allows.
    """

    pool_path: str


class LeaseFailed(Message, tag="failed", frozen=True, kw_only=True):
    """A part cannot be had: a code of the error taxonomy and a sentence."""

    code: str
    message: str


class LeaseDone(Message, tag="done", frozen=True, kw_only=True):
    """Every part is ready. What the fetch took is the loader's to report."""


FromWorker = Hello | Lease | WorkerSaid | WorkerHere
FromLoader = Relayed | LeaseGranted | PartReady | LeaseFailed | LeaseDone
