"""Encoders of BERT's kind taken apart: embeddings, one layer at a time, head.

Post-norm layers (Devlin et al. 2019, section 3). The second norm of the last layer is the head's:
see ``pilotlight.checkpoint.encoders``, which also says which tensors there are.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.checkpoint.encoders import ENCODERS, encoder_parts
from pilotlight.engine.models.decoder import Decoder, Packs, Shapes
from pilotlight.engine.models.layers import Weights, linear
from pilotlight.policy.model import ModelSpec
from pilotlight.policy.pooling import EncoderSpec, Task

See = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of all of a text's tokens to each other: three times [num_tokens, num_heads, head_dim]
-> [num_tokens, num_heads * head_dim]."""

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": functional.gelu,
        "gelu_new": partial(functional.gelu, approximate="tanh"),
        "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
        "relu": functional.relu,
        "silu": functional.silu,
        "swish": functional.silu,
    }
)


class Encoder(Decoder):
    """Its tensors lie and are placed as a decoder's; what they compute is its own."""

    plain_layers = False

    def __init__(self, spec: ModelSpec, encoder: EncoderSpec) -> None:
        self.spec = spec
        self.encoder = encoder
        self._parts = encoder_parts(spec, encoder)
        self._activate = ACTIVATIONS[encoder.activation]

    def prefix(self, part: int) -> str:
        """Nothing: names are those of the checkpoint."""
        return ""

    def stored_name(self, part: int, name: str) -> str:
        """The name itself."""
        return name

    def with_constants(self, place: Callable[[Tensor], Tensor]) -> "Encoder":
        """Itself: it has none."""
        return self

    def _plain_shapes(self, part: int) -> Shapes:
        return dict(self._parts[part])

    def packs(self, part: int) -> Packs:
        """None: each projection is one of its own."""
        return {}

    def embed_texts(
        self, weights: Weights, token_ids: Tensor, positions: Tensor, types: Tensor
    ) -> Tensor:
        """Part 0.

        Args:
            weights: of the part.
            token_ids: [num_tokens].
            positions: [num_tokens], each within its text.
            types: [num_tokens], 0 in a first text and 1 in a second one.

        Returns:
            [num_tokens, hidden].
        """
        table = partial(self._embedding, weights)
        # In this order, as transformers adds them.
        states = table("word", token_ids) + table("token_type", types)
        states = states + table("position", positions + self.encoder.first_position)
        return self._norm(weights, f"{self.spec.tensor_prefix}embeddings.LayerNorm", states)

    def encode(self, layer: int, weights: Weights, hidden: Tensor, see: See) -> Tensor:
        """One layer: [num_tokens, hidden] -> the same.

        Args:
            layer: its number in the model.
            weights: of its part.
            hidden: the states before it.
            see: attention within each text.
        """
        spec = self.spec
        name = f"{spec.tensor_prefix}encoder.layer.{layer}"
        queries, keys, values = (
            linear(weights, f"{name}.attention.self.{kind}", hidden).view(
                -1, spec.num_heads, spec.head_dim
            )
            for kind in ("query", "key", "value")
        )
        seen = linear(weights, f"{name}.attention.output.dense", see(queries, keys, values))
        hidden = self._norm(weights, f"{name}.attention.output.LayerNorm", seen + hidden)
        opened = self._activate(linear(weights, f"{name}.intermediate.dense", hidden))
        hidden = linear(weights, f"{name}.output.dense", opened) + hidden
        if layer + 1 == spec.num_layers:
            return hidden
        return self._norm(weights, f"{name}.output.LayerNorm", hidden)

    def final_norm(self, weights: Weights, hidden: Tensor) -> Tensor:
        """The last layer's second norm."""
        last = self.spec.num_layers - 1
        name = f"{self.spec.tensor_prefix}encoder.layer.{last}.output.LayerNorm"
        return self._norm(weights, name, hidden)

    def classify(self, weights: Weights, states: Tensor) -> Tensor:
        """A cross-encoder's score of first tokens: [rows, hidden] -> [rows, 1]; of another model
        the states as they are.
        """
        spec = self.spec
        if spec.task is not Task.SCORE:
            return states
        if ENCODERS[spec.architecture].padded_positions:
            dense, last = "classifier.dense", "classifier.out_proj"
        else:
            dense, last = f"{spec.tensor_prefix}pooler.dense", "classifier"
        return linear(weights, last, torch.tanh(linear(weights, dense, states)))

    def _embedding(self, weights: Weights, kind: str, ids: Tensor) -> Tensor:
        table = weights[f"{self.spec.tensor_prefix}embeddings.{kind}_embeddings.weight"]
        return functional.embedding(ids, table)

    def _norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(
            x,
            x.shape[-1:],
            weights[f"{name}.weight"],
            weights[f"{name}.bias"],
            self.spec.rms_norm_eps,
        )
