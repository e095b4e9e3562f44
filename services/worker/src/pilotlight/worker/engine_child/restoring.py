"""Stages that are restored from artifacts: what must be as it was recorded, and the canary that
proves it.

The canary is the recorded prompt. It runs alone, in the first moment in which the engine has
nothing to do after the stage's first token: batches of other shapes may round otherwise, and no
client waits for it. What it gives must be what was recorded.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import structlog

from pilotlight.common.errors import PilotlightError, RestoreFailed
from pilotlight.common.messages.codec import decode_json
from pilotlight.common.messages.engine import Produced
from pilotlight.engine.errors import EngineError
from pilotlight.engine.results import FirstPrefill, StageRoom
from pilotlight.policy.ids import InstanceId, RequestId
from pilotlight.policy.materialized import FORMAT, Artifact, Canary
from pilotlight.policy.request import FinishReason, Sampling, Vocabulary

log = structlog.get_logger()

CANARY = RequestId("canary")
"""No request of a gateway has a name that short."""


class ProvingEngine(Protocol):
    """What a canary asks of the engine."""

    def add(
        self,
        request_id: RequestId,
        attempt: int,
        instance_id: InstanceId,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        sampling: Sampling,
        deadline_s: float | None,
        *,
        vocabulary: Vocabulary | None,
    ) -> None: ...
    def abort(self, request_id: RequestId, attempt: int) -> None: ...


def canary_sampling(tokens: int) -> Sampling:
    """Of a canary: the most probable tokens."""
    return Sampling(seed=0, max_tokens=tokens, temperature=0.0, ignore_eos=True)


class Restoring:
    """The stages of one engine that came from artifacts."""

    def __init__(self) -> None:
        self._unproven: dict[InstanceId, Canary] = {}
        self._due: deque[InstanceId] = deque()
        """Those that have given their first token."""
        self._running: InstanceId | None = None
        self._attempt = 0
        self._output: list[int] = []
        self.proved: InstanceId | None = None
        """The stage whose canary gave last what was recorded."""

    @property
    def due(self) -> bool:
        """A stage is to be proved as soon as nothing else is to be done."""
        return bool(self._due) and self._running is None

    def begin(
        self, instance_id: InstanceId, manifest: bytes, device_bytes: int, room: StageRoom
    ) -> None:
        """A stage's room is made, as its artifact says.

        Args:
            instance_id: the stage's.
            manifest: of its artifact.
            device_bytes: that it was given.
            room: that it has.

        Raises:
            RestoreFailed: it is not what was recorded.
        """
        try:
            artifact = decode_json(manifest, Artifact)
        except PilotlightError as error:
            raise RestoreFailed(f"the artifact cannot be read: {error.message}") from error
        layout = artifact.layout
        found = (room.parameter_bytes, room.kv_bytes_per_token)
        recorded = (layout.parameter_bytes, layout.kv_bytes_per_token)
        if artifact.format != FORMAT or found != recorded:
            raise RestoreFailed(f"the layout is {found}, and {recorded} was recorded")
        if not layout.admits(device_bytes, room.kv_capacity_tokens):
            raise RestoreFailed(
                f"{device_bytes} bytes have room for {room.kv_capacity_tokens} tokens, and "
                f"{layout.device_bytes} had it for {layout.kv_capacity_tokens}"
            )
        self._unproven[instance_id] = artifact.canary

    def first_token(self, first: FirstPrefill) -> None:
        """A stage has given its first token: it can be proved from now on."""
        if first.instance_id in self._unproven and first.instance_id != self._running:
            self._due.append(first.instance_id)

    def drop(self, instance_id: InstanceId) -> None:
        """The stage is held no longer."""
        self._unproven.pop(instance_id, None)
        if instance_id in self._due:
            self._due.remove(instance_id)

    def prove_one(self, engine: ProvingEngine) -> None:
        """The engine has nothing to do: begin with a canary, if one is due."""
        if self._running is not None or not self._due:
            return
        instance_id = self._due[0]
        canary = self._unproven[instance_id]
        self._attempt += 1
        self._running, self._output = instance_id, []
        try:
            engine.add(
                CANARY,
                self._attempt,
                instance_id,
                canary.prompt_ids,
                (),
                canary_sampling(len(canary.output_ids)),
                None,
                vocabulary=None,
            )
        except (EngineError, PilotlightError) as error:
            # It has less room than the canary needs, or is leaving: no reason to distrust it.
            log.info("canary left out", action="canary_left_out", error=str(error))
            self._running = None
            self.drop(instance_id)

    def make_way(self, engine: ProvingEngine) -> None:
        """A request has come: the canary waits for the next quiet moment."""
        if self._running is not None:
            engine.abort(CANARY, self._attempt)

    def take(self, produced: Sequence[Produced]) -> tuple[Produced, ...]:
        """What a step gave, without what it gave the canary.

        Raises:
            RestoreFailed: that is not what was recorded.
        """
        if self._attempt == 0:
            return tuple(produced)
        rest = tuple(one for one in produced if one.request_id != CANARY)
        for one in produced:
            if one.request_id == CANARY and one.attempt == self._attempt:
                self._output.extend(one.token_ids)
                if one.finish is not None:
                    self._ended(one.finish)
        return rest

    def _ended(self, finish: FinishReason) -> None:
        instance_id, self._running = self._running, None
        canary = self._unproven.get(instance_id) if instance_id is not None else None
        if instance_id is None or canary is None or finish is not FinishReason.LENGTH:
            return
        self.drop(instance_id)
        if tuple(self._output) != canary.output_ids:
            raise RestoreFailed(
                f"the canary of {instance_id} gave {self._output}, and {list(canary.output_ids)} was recorded"
            )
        self.proved = instance_id
        log.info("restore proved", action="restore_proved", instance_id=instance_id)
