"""What a build does: a profile, a canary and compiled kernels in one engine, graphs in a second one
where the device has any, and the proof of all in a last one.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import msgspec
import structlog

from pilotlight.common.errors import EngineFailed, PilotlightError, RestoreFailed
from pilotlight.common.messages.artifacts import ClaimedBuild
from pilotlight.common.messages.codec import encode_json
from pilotlight.common.messages.graphs import (
    GraphsRecorded,
    GraphWays,
    KernelsRecorded,
    Precomputed,
    StageKernels,
)
from pilotlight.policy.builds import needed_bytes
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.coldstart.cuts import usual_ranges
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import (
    COMPILE_CACHE,
    FORMAT,
    GRAPHS,
    Artifact,
    Canary,
    DecodeTime,
    Layout,
    PrefillTime,
    Profile,
)
from pilotlight.policy.model import Model
from pilotlight.worker.build_files import WITNESS, BuildFiles, LeftOut
from pilotlight.worker.build_ranges import files_of, proved_ranges, with_ranges, without_ranges
from pilotlight.worker.build_session import BuildSession, MakeSession, Outcome
from pilotlight.worker.build_tour import tour

log = structlog.get_logger()

PROMPT_TOKENS = (16, 64, 256, 1024, 4096)
"""Of the prompts whose times are measured, as far as the model takes them."""
BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (16, 256)
"""Of decode steps."""
DECODE_TOKENS = 8
CANARY_PROMPT, CANARY_TOKENS = 12, 6

Told = Callable[[str, float], Awaitable[None]]
"""A step's name, and the share of the build that is done when it begins."""


@dataclass(frozen=True, slots=True)
class Built:
    """What a build comes to."""

    manifest: bytes
    archives: dict[Digest, bytes] = field(default_factory=dict[Digest, bytes])
    """Objects that the manifest names."""


@dataclass(frozen=True, slots=True)
class _Build:
    """What all steps of one build go by."""

    model: Model
    make_session: MakeSession
    told: Told
    files: BuildFiles
    ways: GraphWays


def prompt_ids(tokens: int, vocab_size: int, salt: int) -> list[int]:
    """A prompt that begins like no other one: the prefix cache would make it faster than it is."""
    return [(salt * 7919 + index * 104_729) % vocab_size for index in range(1, tokens + 1)]


async def build(
    claimed: ClaimedBuild,
    make_session: MakeSession,
    told: Told,
    ways: GraphWays | None = None,
    *,
    ranges: bool = False,
) -> Built:
    """A model's artifact.

    Args:
        claimed: the model, and the environment.
        make_session: makes an engine, not started.
        told: is told what comes next.
        ways: how its graphs are recorded and proved, which it has with compiled kernels if the
            device has any; None: it has neither.
        ranges: those of the usual ranges of its layers, too, if the ways are the usual ones.

    Raises:
        RestoreFailed: the second engine does not compute what the first one did.
        PilotlightError: it cannot be built.
    """
    on_gpu = claimed.fingerprint.environment.device_kind is DeviceKind.CUDA
    graphs = ways is not None and on_gpu
    ranged = ranges and graphs and ways == GraphWays()
    files = BuildFiles(usual_ranges(claimed.model.spec) if ranged else ())
    work = _Build(claimed.model, make_session, told, files, ways or GraphWays())
    try:
        artifact = await _first(work, claimed, kernels=graphs)
        if graphs:
            await told("graphs", 0.72)
            artifact = await _with_graphs(work, artifact)
        return await _finished(work, artifact)
    finally:
        files.close()


async def _first(work: _Build, claimed: ClaimedBuild, *, kernels: bool) -> Artifact:
    """What one engine comes to: layout, profile and canary, and the kernels that it compiled.

    Raises:
        PilotlightError: the model does not run.
    """
    model = work.model
    device_bytes = needed_bytes(model, claimed.fingerprint.environment)
    session, recorded = work.make_session(note_kernels=kernels), None
    try:
        await work.told("start", 0.0)
        up = await session.start()
        if up.environment != claimed.fingerprint.environment:
            raise EngineFailed("the engine of the build runs in another environment")
        await work.told("load", 0.2)
        place = work.files.path(COMPILE_CACHE) if kernels else ""
        room_tokens = await session.load(
            model, device_bytes, precomputed=Precomputed(record_kernels=place)
        )
        took = session.took
        profile = await _profile(session, model, room_tokens, up.load_bytes_per_s, work.told)
        profile = replace(profile, load_s=took.load_s or 0.0, init_s=took.init_s or 0.0)
        await work.told("canary", 0.65)
        prompt = prompt_ids(CANARY_PROMPT, model.spec.vocab_size, 0)
        output = _only(await session.run([prompt], CANARY_TOKENS))
        if kernels:
            await work.told("kernels", 0.68)
            recorded = await _toured(session, model, room_tokens)
    finally:
        await session.close()
    spec = model.spec
    artifact = Artifact(
        format=FORMAT,
        fingerprint=claimed.fingerprint,
        layout=Layout(
            device_bytes=device_bytes,
            parameter_bytes=model.device_bytes(spec.whole),
            kv_bytes_per_token=spec.kv_bytes_per_token(spec.whole, model.dtype),
            kv_capacity_tokens=room_tokens,
        ),
        profile=profile,
        canary=Canary(prompt_ids=tuple(prompt), output_ids=tuple(output)),
    )
    if not kernels:
        return artifact
    try:
        blob = work.files.written(recorded, COMPILE_CACHE)
    except LeftOut as left_out:
        return _without(artifact, left_out)
    assert recorded is not None
    return replace(artifact, blobs=(blob,), compiled=recorded.made_for)


async def _with_graphs(work: _Build, artifact: Artifact) -> Artifact:
    """The artifact with graphs, recorded in an engine of their own, or with the name of what is in
    their way.
    """
    try:
        ways = work.ways
        if ways.pointers == "indirect":
            seen = await _record(work, artifact, WITNESS, ways)
            if seen is None or seen.blob is None:
                field = seen.refused if seen is not None else "engine"
                raise LeftOut(GRAPHS, field, f"the witness recorded nothing: {seen}")
            ways = msgspec.structs.replace(ways, witness=work.files.path(WITNESS))
        recorded = await _record(work, artifact, GRAPHS, ways)
        blob = work.files.written(recorded, GRAPHS)
    except LeftOut as left_out:
        return _without(artifact, left_out)
    except PilotlightError as error:
        return _without(artifact, LeftOut(GRAPHS, error.code, error.message))
    assert recorded is not None
    artifact = replace(artifact, blobs=(*artifact.blobs, blob), graphs=recorded.layout)
    return with_ranges(artifact, recorded.ranges, work.files)


async def _record(
    work: _Build, artifact: Artifact, kind: str, ways: GraphWays
) -> GraphsRecorded | None:
    """What an engine of its own records, into a file of the build.

    Raises:
        PilotlightError: it does not.
    """
    session = work.make_session(record_images=True, witness=kind == WITNESS)
    try:
        await session.start()
        await session.load(
            work.model,
            artifact.layout.device_bytes,
            record=work.files.path(kind),
            precomputed=Precomputed(
                ways=ways, ranges=files_of(work.files) if kind == GRAPHS else ()
            ),
        )
    finally:
        await session.close()
    return session.recorded


def _without(artifact: Artifact, left_out: LeftOut) -> Artifact:
    """The artifact as it is without that, saying why."""
    log.warning(
        "built without a part",
        action=f"build_without_{left_out.kind}",
        field=left_out.field,
        why=str(left_out),
    )
    rest = replace(artifact, blobs=tuple(b for b in artifact.blobs if b.kind != left_out.kind))
    if left_out.kind == GRAPHS:
        rest = without_ranges(rest, left_out.field)
        return replace(rest, graphs=None, graphs_refused=left_out.field)
    return replace(rest, compiled=None, compiled_refused=left_out.field)


async def _finished(work: _Build, artifact: Artifact) -> Built:
    """What the artifact comes to, with as much as another process proves.

    Raises:
        RestoreFailed: another process does not compute what was recorded.
        PilotlightError: there is no other process.
    """
    while True:
        manifest = encode_json(artifact)
        await work.told("validate", 0.8)
        try:
            restore_s = await _validate(work, artifact, manifest)
        except LeftOut as left_out:
            artifact = _without(artifact, left_out)
        except PilotlightError as error:
            if artifact.graphs is None and artifact.compiled is None:
                raise
            # Graphs are at fault before kernels: each try has one part less.
            kind = GRAPHS if artifact.graphs is not None else COMPILE_CACHE
            artifact = _without(artifact, LeftOut(kind, error.code, error.message))
        else:
            artifact = await proved_ranges(artifact, work.model, work.make_session, work.files)
            artifact = replace(artifact, profile=replace(artifact.profile, restore_s=restore_s))
            manifest = encode_json(artifact)
            await work.told("store", 0.95)
            archives = work.files.archives
            return Built(manifest, {one.digest: archives[one.digest] for one in artifact.blobs})


async def _validate(work: _Build, artifact: Artifact, manifest: bytes) -> float:
    """Restore it in a fresh process, as a start does; what that took beside the parameters, in
    seconds.

    Raises:
        RestoreFailed: that does not compute what was recorded.
        LeftOut: it does not restore all graphs, or no kernels.
    """
    session = work.make_session()
    graphs = work.files.path(GRAPHS) if artifact.graphs is not None else ""
    kernels = work.files.path(COMPILE_CACHE) if artifact.compiled is not None else ""
    precomputed = Precomputed(kernels=kernels, only=bool(kernels), ways=work.ways)
    try:
        await session.start()
        room_tokens = await session.load(
            work.model, artifact.layout.device_bytes, manifest, graphs, precomputed=precomputed
        )
        restore_s = session.took.restore_s or 0.0
        canary = artifact.canary
        output = _only(await session.run([canary.prompt_ids], len(canary.output_ids)))
        if tuple(output) != canary.output_ids:
            raise RestoreFailed(
                f"a second process gave {output}, and {list(canary.output_ids)} was recorded"
            )
        if artifact.graphs is not None:
            said, layout = session.graphs, artifact.graphs
            if said is None or said.proved != len(layout.digests):
                field = said.refused if said is not None else ""
                recorded = f"{len(layout.trials)} steps and {len(layout.prompts)} prompts"
                raise LeftOut(GRAPHS, field or "unproved", f"{said}, and {recorded} were recorded")
        if artifact.compiled is not None:
            await _tour(session, work.model, room_tokens)
            _check_kernels(session.kernels, await session.unload())
        return restore_s
    finally:
        await session.close()


def _check_kernels(said: StageKernels | None, ran: KernelsRecorded | None) -> None:
    """What a process says that has had no compiled kernels but the artifact's.

    Raises:
        LeftOut: it did not take them.
    """
    if said is None or said.refused or ran is None:
        field = said.refused if said is not None else ""
        raise LeftOut(COMPILE_CACHE, field or "unproved", f"{said}")
    if ran.compiled:
        # The others are worth having.
        log.warning("kernels are missing", action="kernels_missing", kernels=ran.compiled)


async def _toured(session: BuildSession, model: Model, room_tokens: int) -> KernelsRecorded | None:
    """What came of the kernels of a tour, and of all that ran before it."""
    try:
        await _tour(session, model, room_tokens)
        return await session.unload()
    except PilotlightError as error:
        return KernelsRecorded(refused=error.code, message=error.message)


async def _tour(session: BuildSession, model: Model, room_tokens: int) -> None:
    vocab, salt = model.spec.vocab_size, 1_000_000
    for step in tour(model.spec.max_context_tokens, room_tokens):
        count = len(step.prompts)
        prompts = [
            prompt_ids(tokens, vocab, salt + number)
            for number, tokens in enumerate((*step.prompts, *step.later))
        ]
        salt += len(prompts)
        await session.run(prompts[:count], step.output_tokens, prompts[count:])


async def _profile(
    session: BuildSession, model: Model, room_tokens: int, load_bytes_per_s: float, told: Told
) -> Profile:
    vocab = model.spec.vocab_size
    limit = min(room_tokens, model.spec.max_context_tokens) - 2
    salt = 1
    # The first step of a process pays for more than itself.
    await session.run([prompt_ids(min(8, limit), vocab, salt)], 2)
    await told("prefill", 0.3)
    prefill: list[PrefillTime] = []
    for tokens in PROMPT_TOKENS:
        if tokens > limit:
            break
        salt += 1
        outcome = await session.run([prompt_ids(tokens, vocab, salt)], 1)
        prefill.append(PrefillTime(tokens=tokens, seconds=outcome.seconds))
    await told("decode", 0.5)
    decode: list[DecodeTime] = []
    for context in CONTEXTS:
        for batch in BATCHES:
            if context + DECODE_TOKENS > limit or batch * (context + DECODE_TOKENS) > room_tokens:
                break
            prompts = [prompt_ids(context, vocab, salt + 1 + index) for index in range(batch)]
            salt += batch
            seconds = _step_s(await session.run(prompts, DECODE_TOKENS), batch)
            if seconds is not None:
                decode.append(DecodeTime(batch=batch, context_tokens=context, seconds=seconds))
    return Profile(load_bytes_per_s=load_bytes_per_s, prefill=tuple(prefill), decode=tuple(decode))


def _step_s(outcome: Outcome, batch: int) -> float | None:
    """What a step took that gave each request of the batch one token; None: there was none."""
    steps = [seconds for tokens, seconds in outcome.steps if tokens == batch]
    return median(steps) if steps else None


def _only(outcome: Outcome) -> Sequence[int]:
    (output,) = outcome.outputs.values()
    return output
