"""A pre-norm decoder taken apart: embedding, one layer at a time, head. The architectures subclass it."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.models.layers import Rotation, Weights, inverse_frequencies, linear, rms_norm, swiglu
from pilotlight.policy.types import ModelSpec

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Stores new keys and values and attends with the queries to all that the requests have:
[num_tokens, num_heads, head_dim], twice [num_tokens, num_kv_heads, head_dim] -> [num_tokens, num_heads * head_dim]."""

EMBEDDING = "embed_tokens.weight"
OUTPUT = "lm_head.weight"


class Decoder:
    """RMSNorm, rotary grouped-query attention and SwiGLU, by Hugging Face's tensor names.

    Holds no parameters: every method gets those of its part, under names within the part (see ``prefix``).
    """

    architecture: ClassVar[str]

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._frequencies = inverse_frequencies(spec)

    def biased_projections(self) -> tuple[str, ...]:
        """Which of ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` have a bias."""
        raise NotImplementedError

    def prefix(self, part: int) -> str:
        """What the checkpoint puts before the names of a part's tensors."""
        if part == 0:
            return "model."
        return f"model.layers.{part - 1}." if part <= self.spec.num_layers else ""

    def shapes(self, part: int) -> dict[str, tuple[int, ...]]:
        """Every tensor of a part, by its name within the part."""
        spec = self.spec
        if part == 0:
            return {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
        if part > spec.num_layers:
            norm: dict[str, tuple[int, ...]] = {"model.norm.weight": (spec.hidden_size,)}
            return norm if spec.tied_embeddings else {**norm, OUTPUT: (spec.vocab_size, spec.hidden_size)}
        return self._layer_shapes()

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        spec = self.spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = {
            "q_proj": (queries, spec.hidden_size),
            "k_proj": (keys, spec.hidden_size),
            "v_proj": (keys, spec.hidden_size),
            "o_proj": (spec.hidden_size, queries),
        }
        return {
            "input_layernorm.weight": (spec.hidden_size,),
            **{f"self_attn.{name}.weight": shape for name, shape in projections.items()},
            **{f"self_attn.{name}.bias": projections[name][:1] for name in self.biased_projections()},
            "post_attention_layernorm.weight": (spec.hidden_size,),
            "mlp.gate_proj.weight": (spec.intermediate_size, spec.hidden_size),
            "mlp.up_proj.weight": (spec.intermediate_size, spec.hidden_size),
            "mlp.down_proj.weight": (spec.hidden_size, spec.intermediate_size),
        }

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotary embedding of a batch. positions: [num_tokens]."""
        return Rotation(self._frequencies, positions, dtype)

    def embed(self, embedding: Weights, token_ids: Tensor) -> Tensor:
        """Part 0: [num_tokens] -> [num_tokens, hidden]."""
        return functional.embedding(token_ids, embedding[EMBEDDING])

    def layer(self, weights: Weights, hidden: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """One decoder layer: [num_tokens, hidden] -> the same."""
        spec = self.spec
        x = rms_norm(hidden, weights["input_layernorm.weight"], spec.rms_norm_eps)
        queries = linear(weights, "self_attn.q_proj", x).view(-1, spec.num_heads, spec.head_dim)
        keys = linear(weights, "self_attn.k_proj", x).view(-1, spec.num_kv_heads, spec.head_dim)
        values = linear(weights, "self_attn.v_proj", x).view(-1, spec.num_kv_heads, spec.head_dim)
        attended = attend(rotation.apply(queries), rotation.apply(keys), values)
        hidden = hidden + linear(weights, "self_attn.o_proj", attended)
        return hidden + swiglu(weights, rms_norm(hidden, weights["post_attention_layernorm.weight"], spec.rms_norm_eps))

    def head(self, weights: Weights, embedding: Weights | None, hidden: Tensor) -> Tensor:
        """The last part: [rows, hidden] -> logits [rows, vocab_size]. ``embedding`` is part 0 where it is tied to the head."""
        x = rms_norm(hidden, weights["model.norm.weight"], self.spec.rms_norm_eps)
        return functional.linear(x, weights[OUTPUT] if embedding is None else embedding[EMBEDDING])
