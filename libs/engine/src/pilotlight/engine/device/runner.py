"""The executor of layer ranges."""

from functools import partial

import torch
from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.index import index_of
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.device.pooling import pool
from pilotlight.engine.device.prompt_scores import score
from pilotlight.engine.errors import BadRequest
from pilotlight.policy.model import ModelSpec, Stage


class RangeRunner:
    """Runs layers [start, stop) of a model for a batch, with the KV of those layers.

    ::

        token ids [num_tokens] ──> [0, a) ──> hidden [num_tokens, hidden] ──> [a, b) ──> ... ──> logits [sampled, vocab_size]

    The stages of an instance run the same batch. So do the ranges of one stage: it can run any of
    its layers for one batch, then others for another, and go on with the first one later.
    """

    def __init__(self, memory: StageMemory, parameters: Parameters, kv: KvCache) -> None:
        self._decoder = memory.decoder
        self._memory = memory
        self._parameters = parameters
        self._kv = kv

    @torch.inference_mode()
    def run(self, batch: Batch, inputs: Tensor, layers: Stage | None = None) -> Tensor:
        """Runs a range and keeps the new keys and values.

        Args:
            batch: segments with this stage's blocks.
            inputs: for a range that begins the model, token ids, [num_tokens] int64; otherwise the
                hidden states that the range before it gave.
            layers: a range within the stage; all of it, if not given.

        Returns:
            Hidden states [num_tokens, hidden_size]; from a range that ends the model the logits of
            each segment that wants them, in order.

        Raises:
            BadRequest: the range is not within the stage, some part of it is not in place yet, or
                the inputs do not fit the batch.
        """
        layers = layers or self._memory.stage
        decoder, parameters, last_part = (
            self._decoder,
            self._parameters,
            self._decoder.spec.num_layers + 1,
        )
        check_run(decoder.spec, self._memory.stage, parameters, layers, batch, inputs)
        index = index_of(batch, decoder.spec.sliding_window_tokens, TORCH_DTYPES[parameters.dtype])
        hidden = decoder.embed(parameters[0], inputs) if layers.start == 0 else inputs
        rotations = decoder.rotations(index.positions, hidden.dtype)
        for layer in range(layers.start, layers.stop):
            hidden = decoder.layer(
                layer,
                parameters[layer + 1],
                hidden,
                rotations,
                partial(self._kv.attend, layer, index),
            )
        if layers.stop < decoder.spec.num_layers:
            return hidden
        embedding = parameters[0] if decoder.spec.tied_embeddings else None
        head = partial(decoder.head, parameters[last_part], embedding)
        score(batch.readings, hidden, head)
        norm = partial(decoder.final_norm, parameters[last_part])
        pool(batch.poolings, decoder.spec.pooling, hidden, norm, head)
        return head(hidden[index.logit_rows])


def check_run(
    spec: ModelSpec,
    stage: Stage,
    parameters: Parameters,
    layers: Stage,
    batch: Batch,
    inputs: Tensor,
) -> None:
    """Refuses what ``RangeRunner.run`` cannot run.

    Args:
        spec: the model.
        stage: layers that can run here.
        parameters: the stage's.
        layers: what is to run.
        batch: what it is to run for.
        inputs: token ids or hidden states, see ``RangeRunner.run``.

    Raises:
        BadRequest: the range is not within the stage, some part of it is not in place yet, or the
            inputs do not fit the batch.
    """
    named = f"layers [{layers.start}, {layers.stop})"
    if not stage.start <= layers.start < layers.stop <= stage.stop:
        raise BadRequest(f"{named} are not within the stage [{stage.start}, {stage.stop})")
    if missing := [part for part in spec.parts_of(layers) if part not in parameters]:
        raise BadRequest(f"{named} need parts that are not in place yet: {missing}")
    shape = (batch.num_tokens,) if layers.start == 0 else (batch.num_tokens, spec.hidden_size)
    dtype = torch.int64 if layers.start == 0 else TORCH_DTYPES[parameters.dtype]
    if inputs.shape != shape or inputs.dtype is not dtype:
        raise BadRequest(
            f"{named} take {dtype} inputs of shape {shape}, not {inputs.dtype} of {tuple(inputs.shape)}"
        )
