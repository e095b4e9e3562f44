"""What a build does: a profile and a canary in one engine, graphs in a second one where the device
has any, and the proof of all in a last one.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

import structlog

from pilotlight.common.errors import EngineFailed, PilotlightError, RestoreFailed
from pilotlight.common.messages.artifacts import ClaimedBuild
from pilotlight.common.messages.codec import encode_json
from pilotlight.policy.builds import needed_bytes
from pilotlight.policy.cluster import DeviceKind
from pilotlight.policy.ids import Digest
from pilotlight.policy.materialized import (
    FORMAT,
    Artifact,
    Canary,
    DecodeTime,
    Layout,
    PrefillTime,
    Profile,
)
from pilotlight.policy.model import Model
from pilotlight.worker.build_session import BuildSession, Outcome
from pilotlight.worker.graph_files import GraphFile, WrongArchive

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


class MakeSession(Protocol):
    """Makes an engine for one step of a build, not started."""

    def __call__(self, *, record_images: bool = False) -> BuildSession:
        """``record_images``: of kernels; the engine is slower for it."""
        ...


@dataclass(frozen=True, slots=True)
class Built:
    """What a build comes to."""

    manifest: bytes
    archives: dict[Digest, bytes] = field(default_factory=dict[Digest, bytes])
    """Objects that the manifest names."""


def prompt_ids(tokens: int, vocab_size: int, salt: int) -> list[int]:
    """A prompt that begins like no other one: the prefix cache would make it faster than it is."""
    return [(salt * 7919 + index * 104_729) % vocab_size for index in range(1, tokens + 1)]


async def build(
    claimed: ClaimedBuild, make_session: MakeSession, told: Told, *, graphs: bool = False
) -> Built:
    """A model's artifact.

    Args:
        claimed: the model, and the environment.
        make_session: makes an engine, not started.
        told: is told what comes next.
        graphs: it has some, if the device has any.

    Raises:
        RestoreFailed: the second engine does not compute what the first one did.
        PilotlightError: it cannot be built.
    """
    model = claimed.model
    device_bytes = needed_bytes(model)
    session = make_session()
    try:
        await told("start", 0.0)
        up = await session.start()
        if up.environment != claimed.fingerprint.environment:
            raise EngineFailed("the engine of the build runs in another environment")
        await told("load", 0.2)
        room_tokens = await session.load(model, device_bytes)
        profile = await _profile(session, model, room_tokens, up.load_bytes_per_s, told)
        await told("canary", 0.7)
        prompt = prompt_ids(CANARY_PROMPT, model.spec.vocab_size, 0)
        output = _only(await session.run([prompt], CANARY_TOKENS))
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
    if not graphs or claimed.fingerprint.environment.device_kind is not DeviceKind.CUDA:
        return await _proved(artifact, model, make_session, told)
    await told("graphs", 0.72)
    file = GraphFile()
    try:
        return await _with_graphs(artifact, model, file, make_session, told)
    except WithoutGraphs as left_out:
        why = left_out.field
        log.warning(
            "built without graphs", action="build_without_graphs", field=why, why=str(left_out)
        )
    finally:
        file.close()
    return await _proved(replace(artifact, graphs_refused=why), model, make_session, told)


class WithoutGraphs(Exception):
    """An artifact has no graphs; ``field`` says why, by name."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


async def _with_graphs(
    artifact: Artifact, model: Model, file: GraphFile, make_session: MakeSession, told: Told
) -> Built:
    """The artifact with graphs, recorded in one process and proved in another.

    Raises:
        WithoutGraphs: they cannot be recorded, or do not give there what they gave here.
    """
    try:
        session = make_session(record_images=True)
        try:
            await session.start()
            await session.load(model, artifact.layout.device_bytes, record=file.path)
        finally:
            await session.close()
        recorded = session.recorded
        if recorded is None or recorded.blob is None:
            refused = ("engine", "it recorded nothing")
            raise WithoutGraphs(
                *((recorded.refused, recorded.message) if recorded is not None else refused)
            )
        file.seal()
        archive = file.read(recorded.blob)
        artifact = replace(artifact, blobs=(recorded.blob,), graphs=recorded.layout)
        return await _proved(artifact, model, make_session, told, file.path, archive)
    except WrongArchive as error:
        raise WithoutGraphs(error.field, "it is not what the engine wrote") from error
    except PilotlightError as error:
        raise WithoutGraphs(error.code, error.message) from error


async def _proved(
    artifact: Artifact,
    model: Model,
    make_session: MakeSession,
    told: Told,
    graphs: str = "",
    archive: bytes = b"",
) -> Built:
    """What an artifact comes to, once it is proved.

    Raises:
        RestoreFailed: another process does not compute what was recorded.
        WithoutGraphs: it does not restore all graphs.
    """
    manifest = encode_json(artifact)
    await told("validate", 0.8)
    await _validate(artifact, manifest, model, make_session(), graphs)
    await told("store", 0.95)
    return Built(manifest, {one.digest: archive for one in artifact.blobs})


async def _validate(
    artifact: Artifact, manifest: bytes, model: Model, session: BuildSession, graphs: str
) -> None:
    """Restore it in a fresh process, as a start does.

    Raises:
        RestoreFailed: that does not compute what was recorded.
        WithoutGraphs: it does not restore all graphs.
    """
    try:
        await session.start()
        await session.load(model, artifact.layout.device_bytes, manifest, graphs)
        canary = artifact.canary
        output = _only(await session.run([canary.prompt_ids], len(canary.output_ids)))
        if tuple(output) != canary.output_ids:
            raise RestoreFailed(
                f"a second process gave {output}, and {list(canary.output_ids)} was recorded"
            )
        if artifact.graphs is not None:
            said, wanted = session.graphs, len(artifact.graphs.trials)
            if said is None or said.proved != wanted:
                field = said.refused if said is not None else ""
                raise WithoutGraphs(field or "unproved", f"{said}, and {wanted} were recorded")
    finally:
        await session.close()


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
