"""A small model with random weights in a file laid out as a host pool is: what a worker loads,
without a loader.
"""

from dataclasses import dataclass
from pathlib import Path

from random_models import random_parts, source_of, spec_of

from pilotlight.common.messages.engine import LoadStage, PlacePart
from pilotlight.common.messages.pool import TensorPlace
from pilotlight.policy.ids import Digest, InstanceId, ModelName
from pilotlight.policy.model import Dtype, Model, ScalingBounds, Slo

ALIGNMENT, FIRST = 64, 4096


@dataclass(frozen=True)
class PoolFile:
    """The file, its model, and where its tensors lie."""

    path: Path
    model: Model
    parts: dict[int, tuple[TensorPlace, ...]]

    def load(self, instance_id: str, kv_tokens: int, dtype: Dtype) -> LoadStage:
        spec = self.model.spec
        kv_bytes = kv_tokens * spec.kv_bytes_per_token(spec.whole, dtype)
        # Whole granules of a GPU, each part and each layer's keys and values for itself.
        rounding = (4 * spec.num_layers + 4) * (2 << 20)
        return LoadStage(
            instance_id=InstanceId(instance_id),
            model=self.model,
            stage=spec.whole,
            device_bytes=self.model.device_bytes(spec.whole) + kv_bytes + rounding,
            pool_path=str(self.path),
        )

    def places(self, instance_id: str) -> list[PlacePart]:
        return [
            PlacePart(instance_id=InstanceId(instance_id), part=part, tensors=tensors)
            for part, tensors in self.parts.items()
        ]


def pool_file(path: Path, kind: str, dtype: Dtype, seed: int) -> PoolFile:
    """Write one."""
    spec = spec_of(kind, dtype)
    image = bytearray(FIRST)
    parts: dict[int, tuple[TensorPlace, ...]] = {}
    for part, tensors in enumerate(random_parts(spec, seed)):
        places: list[TensorPlace] = []
        for name, tensor in tensors.items():
            stored, shape, data = source_of(tensor)
            image.extend(bytes(-len(image) % ALIGNMENT))
            places.append(
                TensorPlace(
                    name=name, dtype=stored, shape=shape, offset=len(image), size_bytes=data.nbytes
                )
            )
            image.extend(data)
        parts[part] = tuple(places)
    image.extend(bytes(-len(image) % FIRST))
    path.write_bytes(image)
    model = Model(
        name=ModelName(kind),
        uri=f"file:///models/{kind}",
        revision=None,
        source_version="1",
        digest=Digest("a" * 64),
        text_digest=Digest("b" * 64),
        dtype=dtype,
        spec=spec,
        slo=Slo(ttft_ms=1000.0, tpot_ms=100.0),
        scaling=ScalingBounds(),
    )
    return PoolFile(path, model, parts)
