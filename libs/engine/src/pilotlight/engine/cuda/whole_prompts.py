"""Whole prompts that cuDNN attends to: the fastest where there are many rows, once it is prepared.

Its first use in a process takes about a second, and each new length some 40 ms, in which all
requests would wait. So lengths are padded to a few, and a length is prepared while there is nothing
to do, once a prompt has asked for it. Until then our own kernel attends, which needs nothing.

::

    a prompt alone ──> its length is wanted ─┬─ prepared ───> cuDNN's from now on
                                             └─ given up ───> our own kernel's for good
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import structlog
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.cuda.attention_metadata import Place, whole_prompt
from pilotlight.engine.faults import context_lost
from pilotlight.policy.model import Dtype, ModelSpec

log = structlog.get_logger()

WHOLE_TOKENS = 1537
"""cuDNN attends to whole prompts of this length or more, alone in their step and of a length that
is prepared; a shorter one is done on the device before the host has called it for every layer."""
WHOLE_STEP = 1024
"""Lengths that cuDNN sees are multiples of it."""
HEAD_DIM, HEAD_DIM_STEP = 128, 8
"""The widest heads that cuDNN takes, and what each width is a multiple of."""

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, [num_tokens, heads of each, head_dim]."""


def may_be_cudnns(spec: ModelSpec, dtype: Dtype) -> bool:
    """Whether cuDNN takes the heads of a model in the dtype that it runs in, and all of its layers
    see whole prompts.
    """
    fits = spec.head_dim <= HEAD_DIM and spec.head_dim % HEAD_DIM_STEP == 0
    return fits and dtype is not Dtype.FLOAT32 and not spec.sliding_layers


def cudnn() -> AbstractContextManager[object]:
    """Within it, ``look_at_whole`` has cuDNN attend."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def padded_length(tokens: int) -> int:
    """The length that cuDNN sees of a prompt of so many tokens."""
    return tokens + -tokens % WHOLE_STEP


def look_at_whole(rows: slice, heads: Heads, scale: float, out: Tensor) -> Tensor:
    """Attention within a whole prompt, which needs nothing of the cache.

    cuDNN prepares for each length, so that lengths are rounded up: rows behind the prompt's are
    seen by none of its own.

    Args:
        rows: the prompt's; they are the last ones.
        heads: of all rows.
        scale: of the scores.
        out: [num_tokens, num_heads * head_dim], what other rows see already.

    Returns:
        The same, those rows included.
    """
    count = rows.stop - rows.start
    beyond = padded_length(count) - count
    # Zeros, not whatever there is: a masked value still counts zero times, and zero times NaN is
    # NaN.
    padded = (
        functional.pad(some[rows], (0, 0, 0, 0, 0, beyond)) if beyond else some[rows]
        for some in heads
    )
    queries, keys, values = (some.transpose(0, 1)[None] for some in padded)
    attended = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        is_causal=True,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    seen = attended[0, :, :count].transpose(0, 1).flatten(1)
    if rows.start == 0:
        return seen
    out[rows].copy_(seen)
    return out


def split_heads(qkv: Tensor, spec: ModelSpec) -> Heads:
    """Views of the projection of queries, keys and values, [num_tokens, ...]."""
    counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    queries, keys, values = qkv.unflatten(1, (-1, spec.head_dim)).split(counts, dim=1)
    return queries, keys, values


def heads_of_zeros(
    spec: ModelSpec, dtype: torch.dtype, tokens: int, place: Place, *, fused: bool
) -> Heads:
    """Heads with the strides of those that a step attends with: cuDNN prepares for these, too.

    Args:
        spec: the model's.
        dtype: in which it runs.
        tokens: of the prompt.
        place: gives the memory.
        fused: the layers are; others turn queries and keys in memory of their own.
    """
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    queries, keys, values = split_heads(place((tokens, width), dtype), spec)
    if not fused:
        turning = spec.num_heads + spec.num_kv_heads
        turned = place((tokens, turning, spec.head_dim), dtype)
        queries, keys = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
    return queries, keys, values


def attend_ahead(heads: Heads, scale: float) -> Tensor:
    """Attends as steps do to prompts of a padded length, and to such as are padded to it: their
    heads are copies, which have other strides.

    Args:
        heads: see ``heads_of_zeros``; as many rows as the length.
        scale: of the scores.

    Returns:
        The attended zeros, which nothing needs.
    """
    length, out = heads[0].shape[0], heads[0].new_empty(0)
    queries, keys, values = heads
    with cudnn():
        for count in (length - 1, length):
            some = queries[:count], keys[:count], values[:count]
            out = look_at_whole(slice(0, count), some, scale, out)
    return out


class WholePrompts:
    """Which lengths are prepared, and which are to be; see ``cuda.idle.Prepares``.

    It knows lengths of prompts that came: multiples of ``WHOLE_STEP`` up to a step's most tokens.
    """

    def __init__(self, prepare: Callable[[int], None]) -> None:
        """Has nothing prepared yet.

        Args:
            prepare: has cuDNN prepare for a padded length, and waits until that is done.
        """
        self._prepare = prepare
        self._wanted: dict[int, None] = {}
        """In the order in which they came."""
        self._prepared: set[int] = set()
        self._given_up: set[int] = set()

    @property
    def is_over(self) -> bool:
        """See ``Prepares``; another length may be wanted later."""
        return not self._wanted

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is one whole prompt of a length that is prepared; else it is wanted."""
        # Beside others our own kernel attends: pieces of prompts are of all lengths.
        if len(batch.segments) > 1 or whole_prompt(batch, WHOLE_TOKENS) is None:
            return False
        length = padded_length(batch.num_tokens)
        if length not in self._prepared | self._given_up:
            self._wanted[length] = None
        return length in self._prepared

    def one(self) -> None:
        """See ``Prepares``: the length that has been wanted longest."""
        if not self._wanted:
            return
        length = next(iter(self._wanted))
        del self._wanted[length]
        try:
            self._prepare(length)
        except RuntimeError as error:
            if context_lost(error):
                raise
            # Without memory for it, too: a step of that length would need it beside its own.
            self._given_up.add(length)
            log.warning(
                "whole prompts stay our own kernel's",
                action="whole_prompts_given_up",
                tokens=length,
                why=str(error),
            )
        else:
            self._prepared.add(length)
