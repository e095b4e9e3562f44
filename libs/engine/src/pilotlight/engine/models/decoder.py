"""A pre-norm decoder taken apart: embedding, one layer at a time, head.

The architectures subclass it.
"""

from collections.abc import Callable
from copy import copy
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.models.layers import Weights, gated, linear, mixture, project, rms_norm
from pilotlight.engine.models.rotary import Rotation, inverse_frequencies
from pilotlight.policy.model import Dtype, ModelSpec

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Stores new keys and values and attends with the queries to all that the layer sees of the
requests: [num_tokens, num_heads, head_dim], twice [num_tokens, num_kv_heads, head_dim] ->
[num_tokens, num_heads * head_dim]."""

Shapes = dict[str, tuple[int, ...]]
Packs = dict[str, tuple[str, ...]]

EMBEDDING = "embed_tokens.weight"
OUTPUT = "lm_head.weight"
QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"


class Rotations(NamedTuple):
    """The rotations of one batch."""

    full: Rotation
    sliding: Rotation
    """Of the layers with a sliding window; the same object where they turn as the others do."""


class RotationTables(NamedTuple):
    """Cosines and sines of one batch, [num_tokens, head_dim / 2] each."""

    full: tuple[Tensor, Tensor]
    sliding: tuple[Tensor, Tensor]


RotationTable = Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]
"""Positions, frequencies, what to multiply with, dtype -> cosines and sines."""

RowsAt = Callable[[Tensor, Tensor], Tensor]
"""Numbers of rows and a table -> those rows."""


class Decoder:
    """RMSNorm, rotary grouped-query attention and a gated feed-forward network, by Hugging Face's
    tensor names.

    Holds no parameters: every method gets those of its part, under names within the part (see
    ``prefix``). What a family does differently it overrides.
    """

    architecture: ClassVar[str]
    head_norms: ClassVar[bool] = False
    """Queries and keys are normed, each head by itself, before they are turned."""
    plain_layers: ClassVar[bool] = True
    """A layer's steps are those of this class: kernels that do several of them at once give the
    same."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self._frequencies = inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        self._rotation_factor = spec.rope_scaling.attention_factor if spec.rope_scaling else 1.0
        sliding_theta = spec.sliding_rope_theta
        self._sliding_frequencies = (
            None
            if sliding_theta is None
            else inverse_frequencies(spec.head_dim, sliding_theta, None)
        )
        self._sliding_layers = frozenset(spec.sliding_layers)
        self._expert_layers = frozenset(spec.experts.layers) if spec.experts else frozenset[int]()

    def with_constants(self, place: Callable[[Tensor], Tensor]) -> Self:
        """The same decoder, with its constants where ``place`` copies them."""
        moved = copy(self)
        moved._frequencies = place(self._frequencies)
        if self._sliding_frequencies is not None:
            moved._sliding_frequencies = place(self._sliding_frequencies)
        return moved

    def biased_projections(self) -> tuple[str, ...]:
        """Which of ``q_proj``, ``k_proj``, ``v_proj``, ``o_proj`` have a bias."""
        return ("q_proj", "k_proj", "v_proj", "o_proj") if self.spec.attention_bias else ()

    def layer_norms(self) -> tuple[str, ...]:
        """Norms of a layer that are as wide as its hidden states."""
        return ("input_layernorm", "post_attention_layernorm")

    def prefix(self, part: int) -> str:
        """What checkpoints put before the names of a part's tensors, unless ``tensor_prefix`` says
        otherwise.
        """
        if part == 0:
            return "model."
        return f"model.layers.{part - 1}." if part <= self.spec.num_layers else ""

    def stored_name(self, part: int, name: str) -> str:
        """What the checkpoint calls a tensor of a part."""
        return (self.prefix(part) + name).replace("model.", self.spec.tensor_prefix, 1)

    def shapes(self, part: int) -> Shapes:
        """Every tensor of a part as it lies on a device, by its name within the part: the scales of
        quantized weights come last.
        """
        weights, quantization = self._plain_shapes(part), self.spec.quantization
        if quantization is None:
            return weights
        scales = {
            quantization.scale_of(name): quantization.placed_scale_shape(shape[0], shape[1])
            for name, shape in weights.items()
            if quantization.covers(name)
        }
        return {**weights, **scales}

    def stored_shapes(self, part: int) -> Shapes:
        """The same as the checkpoint has them."""
        weights, quantization = self._plain_shapes(part), self.spec.quantization
        if quantization is None:
            return weights
        scales = {
            quantization.scale_of(name): quantization.stored_scale_shape(shape[0], shape[1])
            for name, shape in weights.items()
            if quantization.covers(name)
        }
        return {**weights, **scales}

    def dtype_of(self, name: str, dtype: Dtype) -> Dtype:
        """Element type of a tensor on a device that computes in ``dtype``."""
        quantization = self.spec.quantization
        return dtype if quantization is None else quantization.placed_dtype(name, dtype)

    def stored_dtype_of(self, name: str) -> Dtype:
        """The same in the checkpoint."""
        spec, quantization = self.spec, self.spec.quantization
        return spec.dtype if quantization is None else quantization.stored_dtype(name, spec.dtype)

    def _plain_shapes(self, part: int) -> Shapes:
        spec = self.spec
        if part == 0:
            return {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
        if part > spec.num_layers:
            norm: Shapes = {"model.norm.weight": (spec.hidden_size,)}
            return (
                norm
                if spec.tied_embeddings
                else {**norm, OUTPUT: (spec.vocab_size, spec.hidden_size)}
            )
        norms: Shapes = {f"{name}.weight": (spec.hidden_size,) for name in self.layer_norms()}
        return {**norms, **self._attention_shapes(), **self._feed_forward_shapes(part - 1)}

    def packs(self, part: int) -> Packs:
        """Tensors that lie back to back in memory, so that one multiplication does for all: the
        name of the whole, and those of its rows' tensors. They follow each other in ``shapes``.
        """
        if not 0 < part <= self.spec.num_layers:
            return {}
        shapes = self.shapes(part)
        kinds = ("weight", "bias") if "q_proj" in self.biased_projections() else ("weight",)
        packs = {
            f"{QKV}.{kind}": tuple(
                f"self_attn.{name}.{kind}" for name in ("q_proj", "k_proj", "v_proj")
            )
            for kind in kinds
        }
        for name in [
            name.removesuffix("gate_proj.weight")
            for name in shapes
            if name.endswith("gate_proj.weight")
        ]:
            packs[f"{name}gate_up_proj.weight"] = (
                f"{name}gate_proj.weight",
                f"{name}up_proj.weight",
            )
        if (quantization := self.spec.quantization) is not None:
            packs |= {
                quantization.scale_of(pack): tuple(map(quantization.scale_of, names))
                for pack, names in packs.items()
                if quantization.covers(pack)
            }
        return packs

    def _attention_shapes(self) -> Shapes:
        spec = self.spec
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        projections = {
            "q_proj": (queries, spec.hidden_size),
            "k_proj": (keys, spec.hidden_size),
            "v_proj": (keys, spec.hidden_size),
            "o_proj": (spec.hidden_size, queries),
        }
        norms = ("q_norm", "k_norm") if self.head_norms else ()
        return {
            **{f"self_attn.{name}.weight": shape for name, shape in projections.items()},
            **{
                f"self_attn.{name}.bias": projections[name][:1]
                for name in self.biased_projections()
            },
            **{f"self_attn.{name}.weight": (spec.head_dim,) for name in norms},
        }

    def _feed_forward_shapes(self, layer: int) -> Shapes:
        spec = self.spec
        if spec.experts is None or layer not in self._expert_layers:
            return _gated_shapes("mlp", spec.hidden_size, spec.intermediate_size)
        shapes: Shapes = {"mlp.gate.weight": (spec.experts.num_experts, spec.hidden_size)}
        for expert in range(spec.experts.num_experts):
            shapes |= _gated_shapes(
                f"mlp.experts.{expert}", spec.hidden_size, spec.experts.intermediate_size
            )
        return shapes

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """The rotary embeddings of a batch. positions: [num_tokens]."""
        full = Rotation(self._frequencies, self._rotation_factor, positions, dtype)
        if self._sliding_frequencies is None:
            return Rotations(full, full)
        return Rotations(full, Rotation(self._sliding_frequencies, 1.0, positions, dtype))

    def rotation_tables(
        self, table: RotationTable, positions: Tensor, dtype: torch.dtype
    ) -> RotationTables:
        """The same as tables, for kernels that turn heads themselves. positions: [num_tokens]."""
        full = table(positions, self._frequencies, self._rotation_factor, dtype)
        if self._sliding_frequencies is None:
            return RotationTables(full, full)
        return RotationTables(full, table(positions, self._sliding_frequencies, 1.0, dtype))

    def norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """One norm over the last dimension. [..., n] -> [..., n]."""
        return rms_norm(x, weights[f"{name}.weight"], self.spec.rms_norm_eps)

    def activate(self, x: Tensor) -> Tensor:
        """What opens the gates of the feed-forward network, element by element."""
        return functional.silu(x)

    def embed(
        self, embedding: Weights, token_ids: Tensor, rows_at: RowsAt = functional.embedding
    ) -> Tensor:
        """Part 0: [num_tokens] -> [num_tokens, hidden].

        Args:
            embedding: the part's weights.
            token_ids: [num_tokens].
            rows_at: takes their rows from the table.
        """
        return rows_at(token_ids, embedding[EMBEDDING])

    def layer(
        self, layer: int, weights: Weights, hidden: Tensor, rotations: Rotations, attend: Attend
    ) -> Tensor:
        """One decoder layer, [num_tokens, hidden].

        Args:
            layer: its number in the model.
            weights: of its part.
            hidden: what comes from the layer before, [num_tokens, hidden].
            rotations: of the batch.
            attend: the layer's attention over the KV cache.
        """
        hidden = hidden + self.attention(
            layer, weights, self.norm(weights, "input_layernorm", hidden), rotations, attend
        )
        return hidden + self.feed_forward(
            layer, weights, self.norm(weights, "post_attention_layernorm", hidden)
        )

    def attention(
        self, layer: int, weights: Weights, x: Tensor, rotations: Rotations, attend: Attend
    ) -> Tensor:
        """Attention with its projections, [num_tokens, hidden].

        Args:
            layer: its number in the model.
            weights: of its part.
            x: hidden states after the norm, [num_tokens, hidden].
            rotations: of the batch.
            attend: the layer's attention over the KV cache.
        """
        spec = self.spec
        num_turning = spec.num_heads + spec.num_kv_heads
        heads = linear(weights, QKV, x).view(-1, num_turning + spec.num_kv_heads, spec.head_dim)
        turning, values = heads[:, :num_turning], heads[:, num_turning:]
        if self.head_norms:
            queries = self.norm(weights, "self_attn.q_norm", turning[:, : spec.num_heads])
            keys = self.norm(weights, "self_attn.k_norm", turning[:, spec.num_heads :])
            turning = torch.cat((queries, keys), dim=1)
        rotation = rotations.sliding if layer in self._sliding_layers else rotations.full
        turned = rotation.apply(turning)
        return linear(
            weights,
            "self_attn.o_proj",
            attend(turned[:, : spec.num_heads], turned[:, spec.num_heads :], values),
        )

    def feed_forward(self, layer: int, weights: Weights, x: Tensor) -> Tensor:
        """The layer's one network or its experts: [num_tokens, hidden] -> the same."""
        experts = self.spec.experts
        if experts is None or layer not in self._expert_layers:
            return gated(weights, "mlp", x, self.activate)
        return mixture(weights, "mlp", x, experts, self.activate)

    def final_norm(self, weights: Weights, hidden: Tensor) -> Tensor:
        """The last part's norm: [rows, hidden] -> the same."""
        return self.norm(weights, "model.norm", hidden)

    def head(self, weights: Weights, embedding: Weights | None, hidden: Tensor) -> Tensor:
        """The last part: [rows, hidden] -> logits [rows, vocab_size].

        ``embedding`` is part 0 where it is tied to the head.
        """
        x = self.final_norm(weights, hidden)
        logits = project(x, weights[OUTPUT] if embedding is None else embedding[EMBEDDING])
        cap = self.spec.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap


def _gated_shapes(name: str, hidden_size: int, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, hidden_size),
        f"{name}.up_proj.weight": (width, hidden_size),
        f"{name}.down_proj.weight": (hidden_size, width),
    }
