"""Compiled kernels of the stages in an engine child: restored from an archive before the first of
them is launched, or recorded into one.

::

    load ──> restore ──> looked up, one by one, as steps need them ──> unload ──> record
                │                     └─ one does not work: all are given up, and kernels are compiled
                └─ misfit: refused by name, and kernels are compiled
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from pilotlight.common.errors import PilotlightError, RestoreFailed
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.engine import LoadStage
from pilotlight.common.messages.graphs import KernelsRecorded, StageKernels
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.materialized import COMPILE_CACHE, Artifact, Blob, CompiledFor
from pilotlight.worker.engine_child.graphs import ArchiveFile, digest_of

if TYPE_CHECKING:
    from pilotlight.engine.cuda.kernel_store import KernelStore

log = structlog.get_logger()


def note_kernels() -> None:
    """Remember every compiled kernel from the first one on; where that cannot be, none are
    recorded.
    """
    from pilotlight.engine.cuda.compiled import KernelsRefused

    try:
        store = _opened()
    except KernelsRefused as refused:
        log.warning("kernels are not noted", action="kernels_not_noted", field=refused.field)
        return
    store.noting = True


class KernelPlans:
    """What is to become of each stage's compiled kernels."""

    def __init__(self) -> None:
        self._records: dict[InstanceId, str] = {}
        """Where to; nowhere, where it is only to be told what was compiled."""
        self._news: list[StageKernels] = []
        self._restored: set[InstanceId] = set()
        self._unsettled: set[InstanceId] = set()
        self._store: KernelStore | None = None

    def begin(self, command: LoadStage) -> None:
        """A stage is to be loaded: its kernels are looked for from now on.

        Raises:
            RestoreFailed: the artifact cannot be read.
        """
        wanted = command.precomputed
        if wanted.record_kernels or wanted.only:
            self._records[command.instance_id] = wanted.record_kernels
        if wanted.kernels and command.artifact:
            self._restore(command)

    def news(self) -> list[StageKernels]:
        """What has changed since the last time."""
        if self._restored and self._store is not None and self._store.broken:
            for instance_id in sorted(self._restored):
                self._refuse(instance_id, "kernels", self._store.broken)
            self._restored.clear()
        said, self._news = self._news, []
        return said

    def settle(self, instance_id: InstanceId) -> None:
        """The stage has its first token."""
        if instance_id in self._unsettled:
            self._unsettled.discard(instance_id)
            self._news.append(StageKernels(instance_id=instance_id, settled=True))

    def rename(self, old_id: InstanceId, new_id: InstanceId) -> None:
        """The stage is another instance's from now on."""
        for known in (self._restored, self._unsettled):
            if old_id in known:
                known.remove(old_id)
                known.add(new_id)

    def drop(self, instance_id: InstanceId) -> None:
        """The stage is held no longer; what nobody needs any more goes."""
        self.settle(instance_id)
        self._restored.discard(instance_id)
        if self._store is not None and not self._restored:
            self._store.close()

    def unloaded(self, instance_id: InstanceId) -> KernelsRecorded | None:
        """The stage is gone: what it used is written down, if that is wanted."""
        path = self._records.pop(instance_id, None)
        if path is None:
            return None
        from pilotlight.engine.cuda.compiled import KernelsRefused

        try:
            store = _opened()
            return _record(store, Path(path)) if path else KernelsRecorded(compiled=store.compiled)
        except (KernelsRefused, OSError) as error:
            field = error.field if isinstance(error, KernelsRefused) else "files"
            log.warning("kernels not recorded", action="kernels_not_recorded", field=field)
            return KernelsRecorded(refused=field, message=str(error))

    def _restore(self, command: LoadStage) -> None:
        try:
            artifact = decode_json(command.artifact, Artifact)
        except PilotlightError as error:
            raise RestoreFailed(f"the artifact cannot be read: {error.message}") from error
        blob, made_for = artifact.compiled_blob, artifact.compiled
        if blob is None or made_for is None:
            return
        from pilotlight.engine.cuda.compiled import KernelsRefused
        from pilotlight.engine.cuda.fitting import GraphsRefused

        archive = ArchiveFile(command.precomputed.kernels, blob)
        try:
            store = _opened()
            here = _made_for()
            if field := made_for.differs(here):
                raise KernelsRefused(
                    field, f"they were compiled for {made_for}, and this is {here}"
                )
            restored = store.restore(archive.read())
        except (KernelsRefused, GraphsRefused) as refused:
            self._refuse(command.instance_id, refused.field, str(refused))
            return
        store.only = command.precomputed.only
        self._store = store
        self._restored.add(command.instance_id)
        self._unsettled.add(command.instance_id)
        log.info("kernels restored", action="kernels_restored", entries=restored)
        self._news.append(StageKernels(instance_id=command.instance_id, restored=restored))

    def _refuse(self, instance_id: InstanceId, field: str, message: str) -> None:
        log.warning("kernels refused", action="kernels_refused", field=field, why=message)
        self._news.append(StageKernels(instance_id=instance_id, refused=field, message=message))


def _record(store: "KernelStore", path: Path) -> KernelsRecorded:
    """Writes down what this process has used since its start.

    Raises:
        KernelsRefused: there is nothing, or too much.
        OSError: the archive cannot be written.
    """
    from pilotlight.engine.cuda.compiled import KernelsRefused, pack

    entries = store.noted()
    if not entries:
        raise KernelsRefused("unused", "no kernel was used, or none was noted")
    archive = pack(entries)
    blob = Blob(kind=COMPILE_CACHE, digest=digest_of(archive), size_bytes=len(archive))
    if len(archive) > blob.most_bytes:
        raise KernelsRefused("size", f"the kernels have {len(archive)} bytes")
    path.write_bytes(archive)
    log.info(
        "kernels recorded", action="kernels_recorded", entries=len(entries), bytes=len(archive)
    )
    return KernelsRecorded(made_for=_made_for(), blob=blob, compiled=store.compiled)


@contextmanager
def compiling_until(unwanted: Callable[[], bool]) -> Generator[None]:
    """A kernel that nobody has compiled yet is wanted until then: see ``KernelStore.wanted_until``.
    Where triton was told to look elsewhere, all are.
    """
    from pilotlight.engine.cuda.compiled import KernelsRefused

    with ExitStack() as until:
        with suppress(KernelsRefused):
            until.enter_context(_opened().wanted_until(unwanted))
        yield


def _opened() -> "KernelStore":
    """This process's, which triton asks from now on.

    Raises:
        KernelsRefused: ``cache_manager`` or ``compiler``: triton looks elsewhere, or is not here.
    """
    from pilotlight.engine.cuda.compiled import KernelsRefused
    from pilotlight.engine.cuda.kernel_store import STORE

    try:
        from pilotlight.engine.cuda.kernels.caching import install
    except ImportError as error:
        raise KernelsRefused("compiler", f"there is no triton: {error}") from error
    install()
    return STORE


def _made_for() -> CompiledFor:
    import torch

    from pilotlight.engine.cuda.kernels.caching import made_for

    return made_for(torch.device("cuda", torch.cuda.current_device()))
