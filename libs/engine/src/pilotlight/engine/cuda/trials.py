"""Trials: fixed steps that prove graphs.

A decode step's trial of n rows runs n requests of one token each. Each row sees itself alone: its
key and value come from the step, are stored nowhere, and nothing of the cache is read. So it gives
the same bits whatever requests have in the cache, and harms none of them.

::

    row     0          1                    2          ...
    splits  [0, 1)     [0, 1), [0, 0)       [0, 1)     every other row's second one is empty: both ways of the kernel run

A prompt's keys are read from the cache, the new ones among them: its trial has the first block,
which is put back afterwards, as its whole block table. 16 of its rows, the last one and those
evenly before it, are stored there, and all rows see those again and again.

::

    row     0 ... 3        ... 7        ... 63          64 rows: each fourth one is stored
    slot    -     0            1            15
    table   [ block 0 )[ block 0 )[ block 0 )[ block 0 )

A range of layers that does not begin with the embedding has hidden states in the place of tokens,
and one that does not end with the head gives some: their bits are what is compared.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.core.blocks import BLOCK_TOKENS
from pilotlight.engine.cuda.attention_metadata import NOWHERE, Words

TOKEN_STRIDE = 104_729
"""Between the token ids of two rows."""
ROWS_AT_ONCE = 16
"""Of logits, while their digest is computed: they take eight bytes a number meanwhile."""
HOST_ROWS = 2
"""So few are copied and looked at on the host: the device's kernels for it are loaded at their
first use, which would take longer, and the first graph waits for its proof."""
HIDDEN_STRIDE, HIDDEN_VALUES, HIDDEN_ONE = 40_503, 65_521, 32_768
"""Hidden states of a trial: multiples of the first, modulo a prime, in units of 1 / the last."""
_MULTIPLIER = 0x9E37_79B9_7F4A_7C15 - (1 << 64)
"""Odd, so that no bit of a product is lost; as a signed number."""
_BITS = {2: torch.int16, 4: torch.int32}


def trial_fields(rows: int, kinds: tuple[str, ...], vocab_size: int) -> dict[str, Words]:
    """The words of a trial (``attention_metadata.fields_of``); those that are missing are 0, or
    nowhere.

    Args:
        rows: of the step.
        kinds: of layers: those that see everything, and those with a window.
        vocab_size: token ids are below.
    """
    counts = np.where(np.arange(rows) % 2 == 0, 1, 2).astype(np.int32)
    firsts = (np.cumsum(counts) - counts).astype(np.int32)
    owners = np.repeat(np.arange(rows, dtype=np.int32), counts)
    stops = (np.arange(len(owners)) == firsts[owners]).astype(np.int32)
    fields: dict[str, Words] = {
        "token_ids": ((np.arange(1, rows + 1) * TOKEN_STRIDE) % vocab_size).astype(np.int32),
        "blocks": np.zeros(1, np.int32),
    }
    for kind in kinds:
        fields |= {
            f"{kind}_firsts": firsts,
            f"{kind}_counts": counts,
            f"{kind}_rows": owners,
            f"{kind}_stops": stops,
        }
    return fields


def prompt_trial_fields(rows: int, vocab_size: int) -> dict[str, Words]:
    """The same of one prompt's trial.

    Args:
        rows: of the prompt, which has no others.
        vocab_size: token ids are below.
    """
    last = np.arange(1, BLOCK_TOKENS + 1) * rows // BLOCK_TOKENS - 1
    # By hand: ``np.unique`` imports 44 ms of masked arrays, in front of a first token.
    stored = last[(last >= 0) & (np.diff(last, prepend=-1) > 0)]
    slots = np.full(rows, NOWHERE, np.int32)
    slots[stored] = np.arange(len(stored), dtype=np.int32)
    return {
        "positions": np.arange(rows, dtype=np.int32),
        "slots": slots,
        "token_ids": ((np.arange(1, rows + 1) * TOKEN_STRIDE) % vocab_size).astype(np.int32),
        "chunk_counts": np.array([rows], np.int32),
        "logit_rows": np.array([rows - 1], np.int32),
        "blocks": np.zeros(-(-rows // BLOCK_TOKENS), np.int32),
    }


def trial_hidden(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Hidden states of a trial, [rows, width] on the host: numbers of [-1, 1), no two rows alike,
    and the same bits in every process, because whole numbers of 16 bits are exact until they are
    rounded once.
    """
    index = np.arange(1, rows * width + 1, dtype=np.int64)
    numbers = (index * HIDDEN_STRIDE % HIDDEN_VALUES).astype(np.float32) / HIDDEN_ONE - 1
    return torch.from_numpy(numbers.astype(np.float32)).view(rows, width).to(dtype)


def digest_of(logits: Tensor) -> str:
    """A digest over every bit of some rows of logits, or of hidden states, computed where they are
    unless they are few; waits for the device.

    Sums of integers, which come out the same in any order and everywhere.
    """
    bits = logits.view(_BITS[logits.element_size()])
    if len(bits) <= HOST_ROWS:
        bits = bits.cpu()
    places = torch.arange(1, 2 * bits.shape[1], 2, dtype=torch.int64, device=bits.device)
    places *= _MULTIPLIER
    sums = [(some.to(torch.int64) * places).sum(dim=1) for some in bits.split(ROWS_AT_ONCE)]
    return hashlib.blake2b(torch.cat(sums).cpu().numpy().tobytes(), digest_size=32).hexdigest()
