"""Graphs of ranges of a model's layers in an artifact: those of the stages that groups usually have
(decision 109).

They are recorded where the whole model is, and proved where the range alone is: a stage has no
memory for other layers, and what leads there is nowhere.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import structlog

from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.graphs import Precomputed, RangeFile, RangeRecorded
from pilotlight.policy.materialized import RANGE_GRAPHS, Artifact, RangeGraphs, range_kind
from pilotlight.policy.model import Model, Stage
from pilotlight.worker.build_files import BuildFiles, LeftOut
from pilotlight.worker.build_session import BuildSession, MakeSession

log = structlog.get_logger()


def files_of(files: BuildFiles) -> tuple[RangeFile, ...]:
    """Where the graphs of each range go."""
    return tuple(
        RangeFile(layers=layers, path=files.path(range_kind(layers))) for layers in files.ranges
    )


def with_ranges(
    artifact: Artifact, recorded: Iterable[RangeRecorded], files: BuildFiles
) -> Artifact:
    """The artifact with the graphs of each range that was wanted, or with the name of what is in
    their way.
    """
    came = {one.layers: one for one in recorded}
    for layers in files.ranges:
        kind, one = range_kind(layers), came.get(layers)
        try:
            blob = files.written(one, kind)
        except LeftOut as left_out:
            log.warning("built without a range", action="build_without_range", field=left_out.field)
            entry = RangeGraphs(layers=layers, refused=left_out.field)
        else:
            assert one is not None
            entry = RangeGraphs(layers=layers, graphs=one.layout)
            artifact = replace(artifact, blobs=(*artifact.blobs, blob))
        artifact = replace(artifact, ranges=(*artifact.ranges, entry))
    return artifact


def without_range(artifact: Artifact, layers: Stage, field: str) -> Artifact:
    """The artifact without the graphs of a range, saying why."""
    kind = range_kind(layers)
    return replace(
        artifact,
        blobs=tuple(one for one in artifact.blobs if one.kind != kind),
        ranges=tuple(
            RangeGraphs(layers=layers, refused=field) if one.layers == layers else one
            for one in artifact.ranges
        ),
    )


def without_ranges(artifact: Artifact, field: str) -> Artifact:
    """The artifact without the graphs of any range."""
    for one in artifact.ranges:
        if one.graphs is not None:
            artifact = without_range(artifact, one.layers, field)
    return artifact


async def proved_ranges(
    artifact: Artifact, model: Model, make_session: MakeSession, files: BuildFiles
) -> Artifact:
    """The artifact with the graphs of those ranges that another process restores and proves, each
    in a stage that has the range alone.

    Args:
        artifact: what is proved already is the whole model.
        model: the artifact's.
        make_session: makes an engine, not started. One proves range after range; it ends with one
            that gives something else.
        files: where the archives are.
    """
    left = deque(one.layers for one in artifact.ranges if one.graphs is not None)
    while left:
        session = make_session()
        try:
            await session.start()
            while left:
                await _prove(session, artifact, model, left[0], files)
                left.popleft()
        except LeftOut as left_out:
            artifact = without_range(artifact, left.popleft(), left_out.field)
        except PilotlightError as error:
            log.warning("a range is not proved", action="range_unproved", error=error.message)
            artifact = without_range(artifact, left.popleft(), error.code)
        finally:
            await session.close()
    return artifact


async def _prove(
    session: BuildSession, artifact: Artifact, model: Model, layers: Stage, files: BuildFiles
) -> None:
    """Restores a range's graphs, and runs the trial of each.

    Raises:
        LeftOut: some are not restored.
        PilotlightError: one does not give what was recorded.
    """
    found = artifact.graphs_of(layers)
    assert found is not None
    file = RangeFile(layers=layers, path=files.path(range_kind(layers)))
    await session.load(
        model,
        artifact.layout.device_bytes,
        encode_json(artifact),
        precomputed=Precomputed(ranges=(file,)),
        layers=layers,
    )
    said = session.graphs
    if said is None or said.proved != len(found[0].digests):
        field = said.refused if said is not None else ""
        raise LeftOut(RANGE_GRAPHS, field or "unproved", f"{said} of {layers}")
    await session.unload()
