"""Gemma 3, text only."""

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.models.decoder import Attend, Decoder, Rotations, RowsAt
from pilotlight.engine.models.layers import Weights, centred_rms_norm


class Gemma3Decoder(Decoder):
    """Four norms in a layer, before and after either half; weights of norms are distances from 1;
    embeddings are scaled.

    Most layers have a sliding window and a rotary base of their own
    (``ModelSpec.sliding_rope_theta``).
    """

    architecture = "Gemma3ForCausalLM"
    head_norms = True
    plain_layers = False

    def layer_norms(self) -> tuple[str, ...]:
        return (*super().layer_norms(), "pre_feedforward_layernorm", "post_feedforward_layernorm")

    def norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        return centred_rms_norm(x, weights[f"{name}.weight"], self.spec.rms_norm_eps)

    def activate(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")

    def embed(
        self, embedding: Weights, token_ids: Tensor, rows_at: RowsAt = functional.embedding
    ) -> Tensor:
        hidden = super().embed(embedding, token_ids, rows_at)
        # Rounded to float32 and then to the stage's dtype, as the model was trained.
        return hidden * torch.tensor(self.spec.hidden_size**0.5, dtype=torch.float32).to(
            hidden.dtype
        )

    def layer(
        self, layer: int, weights: Weights, hidden: Tensor, rotations: Rotations, attend: Attend
    ) -> Tensor:
        attended = self.attention(
            layer, weights, self.norm(weights, "input_layernorm", hidden), rotations, attend
        )
        hidden = hidden + self.norm(weights, "post_attention_layernorm", attended)
        fed = self.feed_forward(
            layer, weights, self.norm(weights, "pre_feedforward_layernorm", hidden)
        )
        return hidden + self.norm(weights, "post_feedforward_layernorm", fed)
