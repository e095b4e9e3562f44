"""Workers, gateways and schedulers to materializer: materialized state, and its builds."""

from pilotlight.common.messages.codec import Message
from pilotlight.policy.ids import Digest, ModelName, WorkerId
from pilotlight.policy.materialized import Environment, Fingerprint
from pilotlight.policy.model import Model

FIND_ARTIFACTS_SUBJECT = "v1.materializer.find"
"""Request/reply: ``FindArtifacts`` → ``ArtifactsFound``."""
PUBLISH_ARTIFACT_SUBJECT = "v1.materializer.publish"
"""Request/reply: ``PublishArtifact`` → ``ArtifactPublished``."""
CLAIM_BUILD_SUBJECT = "v1.materializer.claim"
"""Request/reply: ``ClaimBuild`` → ``BuildClaimed``."""
REPORT_BUILD_SUBJECT = "v1.materializer.report"
"""Request/reply: ``ReportBuild`` → ``BuildHeard``."""
END_BUILD_SUBJECT = "v1.materializer.end"
"""Request/reply: ``EndBuild`` → ``BuildHeard``."""
FINISH_BUILD_SUBJECT = "v1.materializer.finish"
"""Request/reply: ``FinishBuild`` → ``ArtifactPublished``."""
MATERIALIZE_SUBJECT = "v1.materializer.materialize"
"""Request/reply: ``Materialize`` → ``Materials``."""
ASK_MATERIALS_SUBJECT = "v1.materializer.ask"
"""Request/reply: ``AskMaterials`` → ``Materials``."""
BUILD_WANTED_SUBJECT = "v1.materializer.wanted"
"""``BuildWanted``, when an operator asks: workers with time look at once."""


class ArtifactInfo(Message, frozen=True, kw_only=True):
    """One artifact: what it is, where its blob lies, and the cluster's signature over both."""

    fingerprint: Digest
    kind: str
    blob_digest: Digest
    size_bytes: int
    signature: str


class FindArtifacts(Message, frozen=True, kw_only=True):
    """Every valid artifact of a fingerprint."""

    fingerprint: Digest
    model_digest: Digest | None = None
    """Where there is none: what is the newest one of this model made for?"""


class ArtifactsFound(Message, frozen=True, kw_only=True):
    """Empty when nothing is materialized: the normal path it is."""

    artifacts: tuple[ArtifactInfo, ...]
    nearest: Fingerprint | None = None
    """Of the newest artifact of the model, where none is of the fingerprint that was asked for."""


class PublishArtifact(Message, frozen=True, kw_only=True):
    """A blob that lies in the object store under its digest: check, sign and list it."""

    fingerprint: Digest
    kind: str
    blob_digest: Digest
    size_bytes: int


class ArtifactPublished(Message, frozen=True, kw_only=True):
    """The artifact as listed."""

    artifact: ArtifactInfo


class ClaimBuild(Message, frozen=True, kw_only=True):
    """A worker has time: is there anything to build for its environment?"""

    worker_id: WorkerId
    environment: Environment
    room_bytes: int
    """Of its device, what a build could have: what is granted to nothing."""
    leased_bytes: int | None = None
    """What it has for a build: it is given none for which that is too little. None: of a release
    that leases nothing, and is given one at once."""


class ClaimedBuild(Message, frozen=True, kw_only=True):
    """One build, which is this worker's as long as it renews its lease."""

    model: Model
    fingerprint: Fingerprint
    attempt: int
    lease_s: float


class BuildClaimed(Message, frozen=True, kw_only=True):
    """None: there is nothing to build, or not before there is more room."""

    build: ClaimedBuild | None = None
    needed_bytes: int = 0
    """There is something to build for a worker that leases so much; 0: there is nothing."""


class ReportBuild(Message, frozen=True, kw_only=True):
    """How far a build is; renews its lease."""

    fingerprint: Digest
    worker_id: WorkerId
    attempt: int
    step: str
    share: float
    """Of the whole build, 0 to 1."""
    blobs: tuple[Digest, ...] = ()
    """Objects that are about to be written: they go if the build comes to nothing."""


class BuildHeard(Message, frozen=True, kw_only=True):
    """Whether the build is still that worker's; if not, it stops."""

    yours: bool = True


class EndBuild(Message, frozen=True, kw_only=True):
    """A build ended without an artifact: it yielded to demand, or failed with an error's code."""

    fingerprint: Digest
    worker_id: WorkerId
    attempt: int
    yielded: bool = False
    code: str = ""
    message: str = ""


class FinishBuild(Message, frozen=True, kw_only=True):
    """The artifact's manifest lies in the object store under its digest, and so do its blobs: check
    them, sign, list, end the build.
    """

    fingerprint: Digest
    worker_id: WorkerId
    attempt: int
    manifest_digest: Digest
    size_bytes: int


class Materialize(Message, frozen=True, kw_only=True):
    """An operator asks for a model's artifact."""

    model: ModelName


class BuildWanted(Message, frozen=True, kw_only=True):
    """An operator has asked."""

    model: ModelName


class AskMaterials(Message, frozen=True, kw_only=True):
    """What is there of a model, and what is being built?"""

    model: ModelName


class BuildFact(Message, frozen=True, kw_only=True):
    """One build as it is now."""

    fingerprint: Digest
    state: str
    step: str
    share: float
    attempt: int
    worker_id: WorkerId
    reason: str
    changed_at: str
    """RFC 3339, UTC."""


class ArtifactFact(Message, frozen=True, kw_only=True):
    """One artifact that is listed."""

    fingerprint: Digest
    kind: str
    size_bytes: int
    created_at: str
    """RFC 3339, UTC."""
    made_for: Fingerprint | None = None
    prefill_tokens_per_s: float = 0.0
    """Of the longest prompt of its profile; 0: it has none."""
    load_bytes_per_s: float = 0.0
    """Of the model's parameters from the host pool to the device, by its profile, as of the next
    two; 0: it does not say."""
    init_s: float = 0.0
    """What a start takes beside them without the artifact."""
    restore_s: float = 0.0
    """What it takes beside them with the artifact."""


class Materials(Message, frozen=True, kw_only=True):
    """Artifacts of a model, and their builds."""

    model: ModelName
    asked_at: str = ""
    """When an operator last asked, RFC 3339; empty: never."""
    builds: tuple[BuildFact, ...] = ()
    artifacts: tuple[ArtifactFact, ...] = ()
