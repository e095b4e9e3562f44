"""A decoder's layers on CUDA: fused where the architecture is the shared one, the decoder's own
steps around the same attention where not.

One layer of the fused kind, for many rows and for one::

    residual ─ add_norm ─ W_qkv ─ decode_attention ─ W_o ─ add_norm ─ W_gate_up ─ silu_mul ─ W_down ─> next residual
    residual ─[norm  W_qkv]───── decode_attention ─[W_o  add]─[norm  W_gate_up  silu_mul]─[W_down  add]─> next residual

Results are rounded where the decoder's own steps round them; only sums within attention and
products run in another order.
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.cuda.attention_metadata import (
    AttentionMetadata,
    KvSplits,
    Place,
    RowMetadata,
)
from pilotlight.engine.cuda.kernels import elementwise
from pilotlight.engine.cuda.kernels.decode_attention import (
    DecodeScratch,
    RawHeads,
    decode_attention,
)
from pilotlight.engine.cuda.kernels.few_rows import product
from pilotlight.engine.cuda.kernels.fp8_rows import Quantized
from pilotlight.engine.cuda.kernels.parts import Parts, whole
from pilotlight.engine.cuda.kernels.prefill_attention import prefill_attention
from pilotlight.engine.cuda.projections import (
    Projections,
    Rows,
    gemv_of,
    projections_of,
)
from pilotlight.engine.cuda.whole_prompts import (
    attend_ahead,
    cudnn,
    heads_of_zeros,
    look_at_whole,
    split_heads,
)
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.device.pooling import pool
from pilotlight.engine.device.prompt_scores import score
from pilotlight.engine.models.decoder import EMBEDDING, GATE_UP, OUTPUT, QKV, Decoder
from pilotlight.engine.models.layers import Weights, scales_of
from pilotlight.policy.model import Stage


class Layers:
    """Runs layer ranges for rows whose attention metadata is on the device already.

    Nothing in here waits for it.
    """

    def __init__(self, decoder: Decoder, parameters: Parameters, kv: KvCache) -> None:
        """``decoder`` is one for the device; see ``Decoder.on``."""
        spec = decoder.spec
        self._decoder = decoder
        self._parameters = parameters
        self._kv = kv
        self._sliding_layers = frozenset(spec.sliding_layers)
        self._scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self._gemv = gemv_of(spec)
        self._dtype = TORCH_DTYPES[parameters.dtype]
        self._projections = projections_of(spec, self._dtype)
        self._width = spec.num_heads * spec.head_dim
        self.fused = decoder.plain_layers and spec.experts is None

    def run(
        self,
        token_ids: Tensor | None,
        hidden: Tensor | None,
        layers: Stage,
        step: AttentionMetadata,
        scratch: DecodeScratch,
        batch: Batch | None = None,
    ) -> Tensor:
        """Runs a range.

        Args:
            token_ids: [num_tokens] int32, for a range that begins the model.
            hidden: [num_tokens, hidden_size] for another.
            layers: the range.
            step: the batch's attention metadata.
            scratch: for as many splits as the step has.
            batch: what is to be said of prompts, by the range that ends the model; None: nothing.

        Returns:
            Hidden states, or logits of the rows that want them.
        """
        # Once for all layers: entering it takes the host as long as starting a kernel or two.
        with nullcontext() if step.whole is None else cudnn():
            return self._run(token_ids, hidden, layers, step, scratch, batch)

    def attend_ahead(self, tokens: int, place: Place) -> Tensor:
        """Has cuDNN prepare for whole prompts.

        Args:
            tokens: their padded length.
            place: gives memory for heads.

        Returns:
            See ``whole_prompts.attend_ahead``.
        """
        spec = self._decoder.spec
        heads = heads_of_zeros(spec, self._dtype, tokens, place, fused=self.fused)
        return attend_ahead(heads, self._scale)

    def rehearse_whole(self, place: Place) -> None:
        """Does what comes behind cuDNN's attention, and may come nowhere else, to a row of zeros: a
        kernel that builds have to compile though no prompt of theirs is cuDNN's.
        """
        self._projections.ready(place((1, self._width), self._dtype))

    def rehearse_beside_prompts(self, layer: int, rows: int, place: Place) -> Tensor:
        """Launches the attention of streams that share a step with prompts, in fused layers: of
        as many rows of zeros, none attends.

        Args:
            layer: that the stage has.
            rows: of the step.
            place: gives memory, zeros.

        Returns:
            The zeros, which nothing needs.
        """
        spec = self._decoder.spec
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        qkv, nothing = place((rows, width), self._dtype), place((rows,), torch.int32)
        room = self._projections.room_for_heads(qkv, self._width, spec.head_dim)
        where = RowMetadata(nothing, nothing, nothing, nothing)
        splits = KvSplits(nothing, nothing, nothing - 1, nothing, nothing)
        scratch = DecodeScratch(1, spec.num_heads, spec.num_kv_heads, spec.head_dim, place)
        stored = self._kv.stored(layer)
        decode_attention(qkv, stored, where, splits, scratch, self._scale, room)
        return qkv

    def _run(
        self,
        token_ids: Tensor | None,
        hidden: Tensor | None,
        layers: Stage,
        step: AttentionMetadata,
        scratch: DecodeScratch,
        batch: Batch | None,
    ) -> Tensor:
        if token_ids is not None:
            hidden = self._decoder.embed(self._parameters[0], token_ids, elementwise.rows_at)
        assert hidden is not None
        if self.fused:
            residual, x = self._fused(
                self._projections,
                hidden if token_ids is not None else hidden.clone(),
                layers,
                step,
                scratch,
            )
            if layers.stop < self._decoder.spec.num_layers:
                return _sum(residual, x)
            if batch is not None and batch.reads:
                self._read(batch, _sum(residual, x))
            return self._head(residual, x, step)
        rotations = self._decoder.rotations(step.rows.positions, hidden.dtype)
        for layer in range(layers.start, layers.stop):
            attend = partial(self._attend, layer, step, scratch)
            hidden = self._decoder.layer(
                layer, self._parameters[layer + 1], hidden, rotations, attend
            )
        if layers.stop < self._decoder.spec.num_layers:
            return hidden
        if batch is not None:
            self._read(batch, hidden)
        return self._head(hidden, None, step)

    def _read(self, batch: Batch, hidden: Tensor) -> None:
        score(batch.readings, hidden, self._plain_head)
        last = self._parameters[self._decoder.spec.num_layers + 1]
        norm = partial(self._decoder.final_norm, last)
        pool(batch.poolings, self._decoder.spec.pooling, hidden, norm, self._plain_head)

    def _plain_head(self, hidden: Tensor) -> Tensor:
        """Logits of rows, however many."""
        last, tied = self._decoder.spec.num_layers + 1, self._decoder.spec.tied_embeddings
        return self._decoder.head(
            self._parameters[last], self._parameters[0] if tied else None, hidden
        )

    def _fused(
        self,
        projections: Projections[Rows],
        residual: Tensor,
        layers: Stage,
        step: AttentionMetadata,
        scratch: DecodeScratch,
    ) -> tuple[Tensor, Tensor | Parts | None]:
        """The residual stream, and what is still to be added to it."""
        spec = self._decoder.spec
        turns = self._decoder.rotation_tables(
            elementwise.rotations, step.rows.positions, residual.dtype
        )
        single = residual.shape[0] == 1 and step.plain
        x: Tensor | Parts | None = None
        for layer in range(layers.start, layers.stop):
            weights = self._parameters[layer + 1]
            raw = RawHeads(
                weights.get(f"{QKV}.bias"),
                (weights["self_attn.q_norm.weight"], weights["self_attn.k_norm.weight"])
                if self._decoder.head_norms
                else None,
                spec.rms_norm_eps,
                turns.sliding if layer in self._sliding_layers else turns.full,
            )
            if single:
                residual = self._one_row(weights, residual, layer, step, scratch, raw)
                continue
            normed = projections.normed(residual, x, weights["input_layernorm.weight"])
            qkv = projections.project(weights, QKV, normed)
            # cuDNN's attention to a whole prompt quantizes nothing.
            room = (
                projections.room_for_heads(qkv, self._width, spec.head_dim)
                if step.whole is None
                else qkv.new_empty(qkv.shape[0], self._width)
            )
            heads = projections.ready(self._attend_raw(layer, step, scratch, qkv, raw, room))
            x = projections.project_divisible(weights, "self_attn.o_proj", heads)
            normed = projections.normed(residual, x, weights["post_attention_layernorm.weight"])
            opened = projections.open(weights, GATE_UP, normed)
            x = projections.project_divisible(weights, "mlp.down_proj", opened)
        return residual, x

    def _one_row(
        self,
        weights: Weights,
        residual: Tensor,
        layer: int,
        step: AttentionMetadata,
        scratch: DecodeScratch,
        raw: RawHeads,
    ) -> Tensor:
        qkv = self._gemv(
            weights[f"{QKV}.weight"],
            residual,
            norm=weights["input_layernorm.weight"],
            scales=scales_of(weights, QKV),
        )
        heads = qkv.new_empty(1, self._width)
        self._attend_raw(layer, step, scratch, qkv, raw, heads)
        residual = self._gemv(
            weights["self_attn.o_proj.weight"],
            heads,
            residual=residual,
            bias=weights.get("self_attn.o_proj.bias"),
            scales=scales_of(weights, "self_attn.o_proj"),
        )
        opened = self._gemv(
            weights[f"{GATE_UP}.weight"],
            residual,
            norm=weights["post_attention_layernorm.weight"],
            gated=True,
            scales=scales_of(weights, GATE_UP),
        )
        return self._gemv(
            weights["mlp.down_proj.weight"],
            opened,
            residual=residual,
            scales=scales_of(weights, "mlp.down_proj"),
        )

    def _attend_raw(
        self,
        layer: int,
        step: AttentionMetadata,
        scratch: DecodeScratch,
        qkv: Tensor,
        raw: RawHeads,
        out: Tensor | Quantized,
    ) -> Tensor | Quantized:
        """Attention from the projection of queries, keys and values. [num_tokens, ...] ->
        [num_tokens, heads * head_dim], in ``out`` but for a whole prompt alone.
        """
        spec, stored = self._decoder.spec, self._kv.stored(layer)
        if step.plain:
            splits = step.sliding_splits if layer in self._sliding_layers else step.splits
            assert splits is not None
            decode_attention(qkv, stored, step.rows, splits, scratch, self._scale, out, raw)
            return out
        elementwise.turn_and_store(
            qkv, raw.bias, raw.norms, raw.eps, raw.turns, step.rows.slots, stored, spec.num_heads
        )
        self._look(layer, step, scratch, qkv, out)
        if step.whole is not None:
            assert isinstance(out, Tensor)
            return look_at_whole(step.whole, split_heads(qkv, spec), self._scale, out)
        return out

    def _attend(
        self,
        layer: int,
        step: AttentionMetadata,
        scratch: DecodeScratch,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """See ``KvCache.attend``: heads come turned."""
        elementwise.store(keys, values, step.rows.slots, self._kv.stored(layer))
        out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
        self._look(layer, step, scratch, queries, out)
        if step.whole is not None:
            return look_at_whole(step.whole, (queries, keys, values), self._scale, out)
        return out

    def _look(
        self,
        layer: int,
        step: AttentionMetadata,
        scratch: DecodeScratch,
        queries: Tensor,
        out: Tensor | Quantized,
    ) -> None:
        """Attends to what is stored, this step's keys and values among it; whole prompts apart."""
        sliding, stored = layer in self._sliding_layers, self._kv.stored(layer)
        if step.chunks is not None:
            window = self._decoder.spec.sliding_window_tokens if sliding else None
            prefill_attention(queries, stored, step.rows, step.chunks, self._scale, out, window)
        splits = step.sliding_splits if sliding else step.splits
        if splits is not None:
            decode_attention(queries, stored, step.rows, splits, scratch, self._scale, out)

    def _head(self, residual: Tensor, x: Tensor | Parts | None, step: AttentionMetadata) -> Tensor:
        """Logits of the rows that want them; the rows' hidden states are ``residual + x``."""
        spec, wanted = self._decoder.spec, step.logit_rows
        plain = not self.fused or spec.logit_softcap is not None
        # Parts are of few rows: the norm of all of them costs no more than that of some.
        later = isinstance(x, Parts) and not plain
        if wanted is not None and not later:
            x = whole(x, residual.dtype)
            residual = elementwise.rows_at(wanted, residual)
            x = None if x is None else elementwise.rows_at(wanted, x)
        weights, embedding = (
            self._parameters[spec.num_layers + 1],
            self._parameters[0] if spec.tied_embeddings else None,
        )
        if plain:
            return self._decoder.head(weights, embedding, _sum(residual, x))
        output = weights[OUTPUT] if embedding is None else embedding[EMBEDDING]
        if residual.shape[0] == 1 and x is None:
            return self._gemv(output, residual, norm=weights["model.norm.weight"])
        normed = elementwise.add_norm(residual, x, weights["model.norm.weight"], spec.rms_norm_eps)
        if wanted is not None and later:
            normed = elementwise.rows_at(wanted, normed)
        return product(output, normed)


def _sum(residual: Tensor, x: Tensor | Parts | None) -> Tensor:
    added = whole(x, residual.dtype)
    return residual if added is None else residual + added
