"""The executor of layer ranges on CUDA."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.cuda.graphs import SIZES, Graphs, size_for
from pilotlight.engine.cuda.kernels.decode_attention import DecodeScratch
from pilotlight.engine.cuda.layers import Layers
from pilotlight.engine.cuda.rows import StaticRows, fields_of, send, whole_prompt
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.device.runner import check_run
from pilotlight.engine.errors import UnsupportedModel
from pilotlight.engine.models.decoder import Decoder
from pilotlight.policy.types import Dtype, Stage

PROGRAMS_PER_PROCESSOR = 4
"""As many programs of the decode attention are to be there for each multiprocessor, if rows are few."""
MAX_BLOCKS = 1 << 17
"""Entries of all block tables of a captured step together; beyond, a step runs eagerly."""

WHOLE_TOKENS = 1024
"""A whole prompt from this length on is attended to by cuDNN, which is faster then."""
CUDNN_HEAD_DIM, CUDNN_HEAD_DIM_STEP = 128, 8


class CudaRangeRunner:
    """See ``RangeRunner``: the same calls, on a CUDA device. Logits of a plain decode step are valid until the next run.

    ::

        every segment one row   ─> static words, one copy ─> graph of the next size ─> output
        anything else           ─> words of its own       ─> kernels, one by one    ─> output
    """

    def __init__(
        self,
        decoder: Decoder,
        stage: Stage,
        parameters: Parameters,
        kv: KvCache,
        device: torch.device,
        *,
        graphs: Graphs | None = None,
    ) -> None:
        """Without ``graphs`` every step runs eagerly.

        Raises:
            UnsupportedModel: the dtype is one that only CPUs run.
        """
        if parameters.dtype is Dtype.FLOAT64:
            raise UnsupportedModel("float64 runs on CPUs alone")
        spec = decoder.spec
        self._decoder = decoder.on(device)
        self._stage = stage
        self._parameters = parameters
        self._device = device
        self._layers = Layers(self._decoder, parameters, kv)
        # Experts are chosen on the host: such a layer waits for the device, and cannot be captured.
        self._graphs = graphs if spec.experts is None else None
        self._window = spec.sliding_window_tokens if spec.sliding_layers else None
        half = parameters.dtype is not Dtype.FLOAT32
        self._whole_from = WHOLE_TOKENS if half and not spec.sliding_layers and _fits_cudnn(spec.head_dim) else None
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._spare = -(-PROGRAMS_PER_PROCESSOR * processors // spec.num_kv_heads)
        self._static = StaticRows(device, SIZES[-1], self._spare, MAX_BLOCKS, self._window)
        self._static_scratch = self._scratch_for(SIZES[-1])
        self._scratch = self._static_scratch
        self._hidden = torch.zeros(SIZES[-1], spec.hidden_size, dtype=TORCH_DTYPES[parameters.dtype], device=device)

    @torch.inference_mode()
    def run(self, batch: Batch, inputs: Tensor, layers: Stage | None = None) -> Tensor:
        """See ``RangeRunner.run``. Inputs may lie on the host; nothing here waits for the device."""
        layers = layers or self._stage
        check_run(self._decoder.spec, self._stage, self._parameters, layers, batch, inputs)
        rows = len(batch.segments)
        size = size_for(rows)
        plain = batch.num_tokens == rows and all(segment.wants_logits for segment in batch.segments)
        if size is not None and plain and self._fill(batch, inputs, layers):
            step = partial(self._decode, layers, size)
            output = self._graphs.run(layers, size, step) if self._graphs else step()
            # Hidden states may wait for their next range while another batch runs.
            return output[:rows] if layers.stop == self._decoder.spec.num_layers else output[:rows].clone()
        fields = fields_of(batch, self._spare, self._window, self._whole_from)
        words = send(fields, self._device, whole_prompt(batch, self._whole_from))
        there = inputs.to(self._device, non_blocking=True)
        if words.items is not None and words.items.rows.shape[0] > self._scratch.max_items:
            self._scratch = self._scratch_for(words.items.rows.shape[0])
        first = layers.start == 0
        return self._layers.run(there if first else None, None if first else there, layers, words, self._scratch)

    def _fill(self, batch: Batch, inputs: Tensor, layers: Stage) -> bool:
        """Puts a plain step's inputs to where its kernels look for them."""
        if layers.start == 0 and inputs.device.type == "cpu":
            return self._static.fill(batch, inputs.numpy().astype(np.int32))
        filled = self._static.fill(batch, None)
        if filled:
            place = self._static.view(len(inputs))[1] if layers.start == 0 else self._hidden[: len(inputs)]
            place.copy_(inputs, non_blocking=True)
        return filled

    def _decode(self, layers: Stage, size: int) -> Tensor:
        step, token_ids = self._static.view(size)
        if layers.start == 0:
            return self._layers.run(token_ids, None, layers, step, self._static_scratch)
        return self._layers.run(None, self._hidden[:size], layers, step, self._static_scratch)

    def _scratch_for(self, rows: int) -> DecodeScratch:
        spec = self._decoder.spec
        return DecodeScratch(rows + self._spare, spec.num_heads, spec.num_kv_heads, spec.head_dim, self._device)


def _fits_cudnn(head_dim: int) -> bool:
    return head_dim <= CUDNN_HEAD_DIM and head_dim % CUDNN_HEAD_DIM_STEP == 0
