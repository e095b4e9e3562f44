"""One stage of a simulated engine."""

from dataclasses import dataclass, field

from pilotlight.common.messages.engine import LoadStage
from pilotlight.common.messages.pipelines import (
    ExtendStage,
    PipelineLeft,
    RenameStage,
    StageGrown,
    StageRenamed,
)
from pilotlight.policy.ids import InstanceId
from pilotlight.policy.model import Model, Stage
from pilotlight.policy.phase import Phase


@dataclass(slots=True, kw_only=True)
class SimStage:
    """What a simulated engine knows of a stage: its range, its bytes, which parts are there."""

    model: Model
    stage: Stage
    """The layers that it runs."""
    device_bytes: int
    target: Stage | None = None
    """The longer range that it is to have."""
    bytes_before: int = 0
    """What it had before it began to grow."""
    placed: set[int] = field(default_factory=set[int])
    ready: bool = False
    prefilled: bool = False
    leads: bool = False
    """It is connected, and begins the model."""
    _room: tuple[Stage | None, int, int] = (None, 0, 0)
    """What KV was last asked about, layers and bytes, and the answer in tokens."""

    @classmethod
    def of(cls, command: LoadStage) -> "SimStage":
        """A stage without any part."""
        return cls(model=command.model, stage=command.stage, device_bytes=command.device_bytes)

    @property
    def serves(self) -> bool:
        """It takes requests."""
        return self.leads or self.stage == self.model.spec.whole

    @property
    def kv_capacity_tokens(self) -> int:
        """What the bytes leave for KV."""
        held, (layers, device_bytes, tokens) = self.target or self.stage, self._room
        if layers is held and device_bytes == self.device_bytes:
            return tokens
        room_bytes = self.device_bytes - self.model.device_bytes(held)
        per_token = self.model.spec.kv_bytes_per_token(held, self.model.dtype)
        tokens = max(0, room_bytes // per_token)
        self._room = held, self.device_bytes, tokens
        return tokens

    @property
    def complete(self) -> bool:
        """Every part is there, of the longer range if there is one."""
        return self.placed.issuperset(self.model.spec.parts_of(self.target or self.stage))

    def refusal_of(self, command: ExtendStage) -> tuple[str, str] | None:
        """Code and sentence if it cannot grow so."""
        stage, layers = self.stage, self.model.spec.num_layers
        longer = (
            stage != command.stage
            and stage.is_within(command.stage)
            and command.stage.stop <= layers
        )
        if self.target is not None:
            return "conflict", "it is growing already"
        if not longer:
            return (
                "invalid_request",
                f"[{stage.start}, {stage.stop}) is not a part of the range that is asked for",
            )
        if command.device_bytes <= self.model.device_bytes(command.stage):
            return "no_room", f"{command.device_bytes} bytes hold no KV beside the parameters"
        return None

    def extend(self, command: ExtendStage) -> None:
        """Begins to grow."""
        self.bytes_before = self.device_bytes
        self.target, self.device_bytes = command.stage, command.device_bytes

    def call_off(self) -> bool:
        """Stays what it was; False where it serves nothing."""
        if self.target is None or not self.leads:
            return False
        self.placed &= set(self.model.spec.parts_of(self.stage))
        self.target, self.device_bytes = None, self.bytes_before
        return True

    def grow(
        self, instance_id: InstanceId, phases: tuple[Phase, ...]
    ) -> tuple[PipelineLeft | StageGrown, ...]:
        """Runs the longer range from now on.

        Args:
            instance_id: Whose it is.
            phases: Of the parts that came.

        Returns:
            What is told of it. One that followed knows nothing of its lead, and is in no pipeline
            any more when it has the whole model.
        """
        assert self.target is not None, "it grows"
        grown = StageGrown(
            instance_id=instance_id,
            stage=self.target,
            kv_capacity_tokens=self.kv_capacity_tokens,
            phases=phases,
        )
        followed = self.stage.start > 0 and self.target == self.model.spec.whole
        self.stage, self.target = self.target, None
        self.leads = self.leads and self.stage != self.model.spec.whole
        return (PipelineLeft(instance_id=instance_id), grown) if followed else (grown,)

    def renamed(self, command: RenameStage) -> StageRenamed:
        """What is told of another name."""
        return StageRenamed(
            instance_id=command.new_id,
            old_id=command.instance_id,
            kv_capacity_tokens=self.kv_capacity_tokens,
        )
