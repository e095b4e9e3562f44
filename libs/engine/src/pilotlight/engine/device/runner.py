"""The executor of a layer range."""

from functools import partial

import torch
from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.device.kv import KvCache, index_of
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.models.decoder import Decoder
from pilotlight.policy.types import Stage


class RangeRunner:
    """Runs layers [start, stop) of a model for a batch, with the KV of those layers.

    ::

        token ids [num_tokens] ──> [0, a) ──> hidden [num_tokens, hidden] ──> [a, b) ──> ... ──> logits [sampled, vocab_size]

    The stages of an instance run the same batch, except that each has blocks of its own.
    """

    def __init__(self, decoder: Decoder, stage: Stage, parameters: Parameters, kv: KvCache) -> None:
        self._decoder = decoder
        self._stage = stage
        self._parameters = parameters
        self._kv = kv

    @torch.inference_mode()
    def run(self, batch: Batch, inputs: Tensor) -> Tensor:
        """Runs the range and keeps the new keys and values.

        Args:
            batch: segments with this stage's blocks.
            inputs: the first stage's token ids, [num_tokens] int64; the previous stage's hidden states otherwise.

        Returns:
            Hidden states [num_tokens, hidden_size]; from the last stage the logits of each segment that wants them, in order.
        """
        decoder, parameters, last_part = self._decoder, self._parameters, self._decoder.spec.num_layers + 1
        index = index_of(batch, decoder.spec.sliding_window_tokens)
        hidden = decoder.embed(parameters[0], inputs) if self._stage.start == 0 else inputs
        rotations = decoder.rotations(index.positions, hidden.dtype)
        for layer in range(self._stage.start, self._stage.stop):
            hidden = decoder.layer(layer, parameters[layer + 1], hidden, rotations, partial(self._kv.attend, layer, index))
        if self._stage.stop < decoder.spec.num_layers:
            return hidden
        embedding = parameters[0] if decoder.spec.tied_embeddings else None
        return decoder.head(parameters[last_part], embedding, hidden[index.logit_rows])
