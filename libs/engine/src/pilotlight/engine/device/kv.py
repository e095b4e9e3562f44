"""The KV cache of a layer range, and attention over it."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.device.index import BatchIndex, Peers, Span, slots_of
from pilotlight.engine.device.memory import StageMemory
from pilotlight.policy.model import Stage


class KvCache:
    """Keys and values of a stage's layers.

    Which request has which blocks is ``core.blocks``' business.

    ::

        each layer  keys    [num_blocks * BLOCK_TOKENS, num_kv_heads, head_dim]
                    values  the same

    Layers with a sliding window keep what they see no longer, too: all layers of a request have the
    same blocks.
    """

    def __init__(self, memory: StageMemory, num_blocks: int) -> None:
        """Takes memory for ``num_blocks`` blocks.

        Raises:
            NoRoom: the device has no such memory.
        """
        spec = memory.decoder.spec
        self._memory = memory
        self._sliding_layers = frozenset(spec.sliding_layers)
        self._scale = spec.attention_scale
        self._found: dict[int, tuple[Tensor, Tensor]] | None = None
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Grows or shrinks to ``num_blocks`` blocks, in place: what lies in those that stay is as
        it was.

        Raises:
            NoRoom: the device has no such memory; nothing has changed then.
        """
        self._memory.resize(num_blocks)
        self._found = None

    def grow_towards(self, even_blocks: int, target_blocks: int) -> None:
        """Grows layer by layer: see ``KvBacking.grow_towards``.

        Raises:
            NoRoom: the device has no such memory; nothing has changed then.
        """
        before = self._memory.num_blocks
        self._memory.grow_towards(even_blocks, target_blocks)
        if self._memory.num_blocks > before:
            self._found = None

    def extend(self, stage: Stage) -> None:
        """Has a longer range of layers, with as many blocks each.

        Those that are new hold nothing yet.

        Raises:
            NoRoom: the device has no such memory; nothing has changed then.
        """
        self._memory.extend(stage)
        self._found = None

    def retract(self, stage: Stage) -> None:
        """Takes back an ``extend``."""
        self._memory.retract(stage)
        self._found = None

    @property
    def _rows(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of each layer. Not cleared: nothing reads a slot before its request has
        written it. Made when they are first used, which is beside a start's copies.
        """
        if self._found is None:
            stage, of = self._memory.stage, self._memory.keys_and_values
            with torch.inference_mode(mode=False):  # They are written outside of it, too.
                self._found = {layer: of(layer) for layer in range(stage.start, stage.stop)}
        return self._found

    @property
    def _device(self) -> torch.device:
        return next(iter(self._rows.values()))[0].device

    def move(self, moves: Mapping[int, int]) -> None:
        """Copies blocks to others, in all layers. None is both a source and a target."""
        # On the device once, and not for each layer anew.
        sources = torch.tensor(list(moves.keys()), device=self._device)
        targets = torch.tensor(list(moves.values()), device=self._device)
        for rows in self._rows.values():
            for half in rows:
                blocks = half.unflatten(0, (-1, BLOCK_TOKENS))
                blocks[targets] = blocks[sources]

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values in place: [num_blocks * BLOCK_TOKENS, num_kv_heads, head_dim]
        each.
        """
        return self._rows[layer]

    @contextmanager
    def first_block_kept(self) -> Generator[None]:
        """Within it, the first block of each layer may be written; afterwards it is what it was."""
        blocks = [half[:BLOCK_TOKENS] for rows in self._rows.values() for half in rows]
        before = torch.empty(
            len(blocks), *blocks[0].shape, dtype=blocks[0].dtype, device=blocks[0].device
        )
        for kept, block in zip(before, blocks, strict=True):
            kept.copy_(block)
        try:
            yield
        finally:
            for kept, block in zip(before, blocks, strict=True):
                block.copy_(kept)

    def read(self, layers: Stage, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """What ``copy`` gives, in the host's memory.

        Args:
            layers: of the model, within the stage.
            blocks: the request's, in order of positions.
            start: first position.
            stop: position after the last one.
        """
        return self.copy(layers, blocks, start, stop).cpu()

    def copy(self, layers: Stage, blocks: Sequence[int], start: int, stop: int) -> Tensor:
        """A copy, on the cache's own device, of one request's keys and values.

        Args:
            layers: of the model, within the stage.
            blocks: the request's, in order of positions.
            start: first position.
            stop: position after the last one.

        Returns:
            [num_layers, 2, stop - start, num_kv_heads, head_dim].
        """
        slots = slots_of(blocks, start, stop).to(self._device)  # Once, and not for each layer anew.
        layer_rows = [
            torch.stack([half[slots] for half in self._rows[layer]])
            for layer in range(layers.start, layers.stop)
        ]
        return torch.stack(layer_rows)

    def write(
        self, layers: Stage, blocks: Sequence[int], start: int, keys_and_values: Tensor
    ) -> None:
        """Stores what ``read`` or ``copy`` gave.

        Args:
            layers: those that were read.
            blocks: the request's here, in order of positions.
            start: first position that is stored.
            keys_and_values: [num_layers, 2, num_tokens, num_kv_heads, head_dim].
        """
        slots = slots_of(blocks, start, start + keys_and_values.shape[2]).to(self._device)
        for layer, rows in zip(range(layers.start, layers.stop), keys_and_values, strict=True):
            for half, new in zip(self._rows[layer], rows, strict=True):
                half[slots] = new.to(half.device)

    def attend(
        self, layer: int, index: BatchIndex, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Stores a batch's keys and values, then attends with each request's queries to that
        request's keys.

        Args:
            layer: the model's layer number.
            index: where the batch's rows stand.
            queries: [num_tokens, num_heads, head_dim], rotated.
            keys: [num_tokens, num_kv_heads, head_dim], rotated.
            values: [num_tokens, num_kv_heads, head_dim].

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        stored = self._rows[layer]
        stored_keys, stored_values = stored
        stored_keys[index.slots] = keys
        stored_values[index.slots] = values
        view = index.sliding if layer in self._sliding_layers else index.full
        if not view.spans and len(view.peers) == 1:
            # A plain decode step: the rows of the only group are those of the batch, in order.
            return _attend_peers(view.peers[0], queries, stored, self._scale).flatten(1)
        attended = torch.empty_like(queries)
        for span in view.spans:
            attended[span.rows] = _attend_span(span, queries[span.rows], stored, self._scale)
        for peers in view.peers:
            attended[peers.rows] = _attend_peers(peers, queries[peers.rows], stored, self._scale)
        return attended.flatten(1)


def _attend_peers(
    peers: Peers, queries: Tensor, stored: tuple[Tensor, Tensor], scale: float | None
) -> Tensor:
    """Attention of single rows, each over its own keys. [num_rows, num_heads, head_dim] -> the
    same.
    """
    keys, values = (
        _gather(half, peers.slots).unflatten(0, (-1, peers.width)).transpose(1, 2)
        for half in stored
    )
    # The heads that share keys become rows of queries: no key is repeated, which would be most of a
    # decode step's time.
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    attended = functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=peers.mask, scale=scale
    )
    return attended.flatten(1, 2)


def _attend_span(
    span: Span, queries: Tensor, stored: tuple[Tensor, Tensor], scale: float | None
) -> Tensor:
    """Attention of one request's rows. [count, num_heads, head_dim] -> the same."""
    keys, values = (
        (
            half[span.slots] if isinstance(span.slots, slice) else _gather(half, span.slots)
        ).transpose(0, 1)[None]
        for half in stored
    )  # [1, num_kv_heads, stop - first, head_dim]
    if len(queries) == 1:
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        return functional.scaled_dot_product_attention(grouped, keys, values, scale=scale).flatten(
            1, 2
        )
    attended = functional.scaled_dot_product_attention(
        functional.pad(queries, (0, 0, 0, 0, 0, span.more_rows)).transpose(0, 1)[None],
        functional.pad(keys, (0, 0, 0, span.more_keys)),
        functional.pad(values, (0, 0, 0, span.more_keys)),
        attn_mask=span.mask,
        is_causal=span.mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return attended[0, :, : len(queries)].transpose(0, 1)


def _gather(half: Tensor, slots: Tensor) -> Tensor:
    """A copy of rows: [slots, num_kv_heads, head_dim] -> [len(slots), num_kv_heads, head_dim].

    Faster on flat rows.
    """
    return half.flatten(1).index_select(0, slots).unflatten(1, half.shape[1:])
