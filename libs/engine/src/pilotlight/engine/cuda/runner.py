"""The executor of layer ranges on CUDA."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pilotlight.engine.core.batch import Batch
from pilotlight.engine.cuda.attention_metadata import (
    Place,
    Words,
    fields_of,
    max_splits,
    send,
    whole_prompt,
    zeros_on,
)
from pilotlight.engine.cuda.graphs import SIZES, GraphSet, Kind, size_for
from pilotlight.engine.cuda.idle import KernelsAhead
from pilotlight.engine.cuda.kernels.decode_attention import MANY_ROWS, DecodeScratch
from pilotlight.engine.cuda.layers import Layers
from pilotlight.engine.cuda.pools import run_in
from pilotlight.engine.cuda.prompts import LENGTHS, StaticPrompt, prompt_length
from pilotlight.engine.cuda.static_words import StaticDecode
from pilotlight.engine.cuda.steps import Captured, RangeSteps
from pilotlight.engine.cuda.whole_prompts import WHOLE_TOKENS, WholePrompts, may_be_cudnns
from pilotlight.engine.device.arena_protocol import TorchMemory
from pilotlight.engine.device.dtypes import TORCH_DTYPES
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.device.runner import check_run
from pilotlight.engine.errors import UnsupportedModel
from pilotlight.policy.graphs.restoring import prompt_size
from pilotlight.policy.model import Dtype, Stage

PROGRAMS_PER_PROCESSOR = 4
"""As many programs of the decode attention are to be there for each multiprocessor, if rows are
few."""
MAX_BLOCKS = 1 << 17
"""Entries of all block tables of a captured step together; beyond, a step runs eagerly."""

MAX_HEAD_DIM = 256
"""Tiles of wider heads do not fit into a multiprocessor's shared memory."""


class CudaRangeRunner:
    """See ``RangeRunner``: the same calls, on a CUDA device.

    Logits of a plain decode step are valid until the next run.

    ::

        every segment one row   ─> static words, one copy ─> graph of the next size   ─> output
        one short prompt alone  ─> static words, one copy ─> graph of the next length ─> output
        anything else           ─> words of its own       ─> kernels, one by one      ─> output
    """

    def __init__(
        self,
        memory: StageMemory,
        parameters: Parameters,
        kv: KvCache,
        eager: TorchMemory,
        *,
        graphs: GraphSet | None = None,
    ) -> None:
        """Takes the memory of captured steps.

        Args:
            memory: the stage's.
            parameters: the stage's; they may be placed later.
            kv: the stage's.
            eager: what torch takes memory from while a step runs eagerly.
            graphs: captured steps; None: every step runs eagerly, as those of a model with experts
                always do.

        Raises:
            UnsupportedModel: the dtype is one that only CPUs run, or heads are wider than the
                kernels take.
            NoRoom: there is no memory for what captured steps read and write.
        """
        if parameters.dtype is Dtype.FLOAT64:
            raise UnsupportedModel("float64 runs on CPUs alone")
        if memory.decoder.spec.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModel(
                f"heads of {memory.decoder.spec.head_dim} are wider than {MAX_HEAD_DIM}, which is the most on a GPU"
            )
        spec, device = memory.decoder.spec, memory.arena.device

        def place(constant: Tensor) -> Tensor:
            return memory.for_steps(tuple(constant.shape), constant.dtype).copy_(constant)

        self._decoder = memory.decoder.with_constants(place)
        self._memory = memory
        self._parameters = parameters
        self._device = device
        self._eager = eager
        self._kv = kv
        self._layers = Layers(self._decoder, parameters, kv)
        # Experts are chosen on the host: such a layer waits for the device, and cannot be captured.
        self._graphs = graphs if spec.experts is None else None
        self._window = spec.sliding_window_tokens if spec.sliding_layers else None
        self._dtype = TORCH_DTYPES[parameters.dtype]
        self.whole_prompts = (
            WholePrompts(partial(_attend_ahead, self._layers, eager, device))
            if may_be_cudnns(spec, parameters.dtype)
            else None
        )
        """None: cuDNN attends to none of this model."""
        beside_prompts = (1, MANY_ROWS) if self._layers.fused else ()
        self.kernels_ahead = KernelsAhead(self._rehearse_beside_prompts, beside_prompts)
        """Of fused layers: others attend beside prompts as they do without."""
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._spare = -(-PROGRAMS_PER_PROCESSOR * processors // spec.num_kv_heads)
        pinned = device.type == "cuda"
        self._static = StaticDecode(
            memory.for_steps, SIZES[-1], self._spare, MAX_BLOCKS, self._window, pinned=pinned
        )
        self._prompt = (
            StaticPrompt(memory.for_steps, pinned=pinned) if spec.experts is None else None
        )
        self._static_scratch = self._scratch_for(
            max_splits(SIZES[-1], self._spare), memory.for_steps
        )
        self._scratch = self._static_scratch
        self._hidden = memory.for_steps(
            (max(SIZES[-1], LENGTHS[-1]), spec.hidden_size), self._dtype
        )

    @property
    def has_trials(self) -> bool:
        """See ``StageSteps``. Steps that are not fused store keys before they read them."""
        return self._graphs is not None and self._layers.fused

    def steps_of(self, layers: Stage | None = None) -> RangeSteps:
        """See ``HasSteps``."""
        spec = self._decoder.spec
        stage = Captured(
            spec=spec,
            memory=self._memory,
            kv=self._kv,
            decode=self._static,
            prompt=self._prompt,
            hidden=self._hidden,
            partial=self._static_scratch.partial,
            proves=self.has_trials,
            run=self._padded,
            output=self._output,
        )
        return RangeSteps(stage, layers or spec.whole)

    def rehearse(self, inputs: Tensor) -> None:
        """Does what is around trials, around a step that runs ahead, and around cuDNN's attention,
        without a step: afterwards all is as it was. For steps that have trials.

        Args:
            inputs: tokens as the sampler leaves them on the device, [1].
        """
        steps = self.steps_of()
        with steps.trial_inputs(prompt_size(LENGTHS[0])):
            pass
        with steps.trial_inputs(SIZES[0]):
            self._static.view(SIZES[0])[1].copy_(inputs, non_blocking=True)
        if self.whole_prompts is not None:
            self._layers.rehearse_whole(zeros_on(self._device))

    @torch.inference_mode()
    def run(self, batch: Batch, inputs: Tensor, layers: Stage | None = None) -> Tensor:
        """See ``RangeRunner.run``. Inputs may lie on the host; nothing here waits for the
        device, unless prompts are scored.
        """
        layers = layers or self._memory.stage
        check_run(self._decoder.spec, self._memory.stage, self._parameters, layers, batch, inputs)
        rows = len(batch.segments)
        size = size_for(rows)
        plain = (
            batch.num_tokens == rows
            and all(segment.wants_logits for segment in batch.segments)
            and not batch.reads
        )
        if size is not None and plain and self._fill(self._static, size, batch, inputs, layers):
            return self._padded(Kind(layers, size), rows, rows)
        length = prompt_length(batch)
        if (
            self._prompt is not None
            and length is not None
            and not batch.reads
            and self._fill(self._prompt, length, batch, inputs, layers)
        ):
            return self._padded(Kind(layers, length, prompt=True), batch.num_tokens, 1)
        whole = self.whole_prompts is not None and self.whole_prompts.takes(batch)
        whole_from = WHOLE_TOKENS if whole else None
        fields = fields_of(batch, self._spare, self._window, whole_from)
        splits = max(len(fields.get(name, ())) for name in ("full_rows", "sliding_rows"))
        if splits > self._scratch.max_splits:
            self._scratch = self._scratch_for(splits, zeros_on(self._device))
        return run_in(
            self._eager, partial(self._eagerly, batch, fields, inputs, layers, whole_from)
        )

    def _eagerly(
        self,
        batch: Batch,
        fields: Mapping[str, Words],
        inputs: Tensor,
        layers: Stage,
        whole_from: int | None,
    ) -> Tensor:
        words = send(fields, self._device, whole_prompt(batch, whole_from))
        first = layers.start == 0
        sent = inputs.to(torch.int32) if first else inputs  # as captured steps have token ids
        there = sent.to(self._device, non_blocking=True)
        return self._layers.run(
            there if first else None,
            None if first else there,
            layers,
            words,
            self._scratch,
            batch,
        )

    def _fill(
        self,
        static: StaticDecode | StaticPrompt,
        size: int,
        batch: Batch,
        inputs: Tensor,
        layers: Stage,
    ) -> bool:
        """Puts a step's inputs to where its kernels look for them."""
        if layers.start == 0 and inputs.device.type == "cpu":
            return static.fill(batch, inputs.numpy().astype(np.int32))
        filled = static.fill(batch, None)
        if filled:
            place = static.view(size)[1] if layers.start == 0 else self._hidden
            place[: len(inputs)].copy_(inputs, non_blocking=True)
        return filled

    def _padded(self, kind: Kind, num_tokens: int, num_logits: int) -> Tensor:
        """Runs a step that is filled in."""
        step, last = partial(self._launch, kind), kind.layers.stop == self._decoder.spec.num_layers
        graphs = self._graphs
        output = (
            run_in(self._eager, step)
            if graphs is None
            else graphs.run(kind, step, partial(self._output, kind))
        )
        # Hidden states may wait for their next range while another batch runs.
        return output[:num_logits] if last else output[:num_tokens].clone()

    def _launch(self, kind: Kind) -> Tensor:
        static = self._prompt if kind.prompt else self._static
        assert static is not None
        step, token_ids = static.view(kind.rows)
        if kind.layers.start == 0:
            return self._layers.run(token_ids, None, kind.layers, step, self._static_scratch)
        return self._layers.run(
            None, self._hidden[: kind.rows], kind.layers, step, self._static_scratch
        )

    def _output(self, kind: Kind) -> Tensor:
        """Where a captured step leaves what it gives."""
        assert self._graphs is not None
        if kind.layers.stop < self._decoder.spec.num_layers:
            return self._hidden[: kind.rows]
        logits = self._graphs.logits(SIZES[-1], self._decoder.spec.vocab_size, self._dtype)
        return logits[: 1 if kind.prompt else kind.rows]

    @torch.inference_mode()
    def _rehearse_beside_prompts(self, rows: int) -> None:
        layer, place = self._memory.stage.start, zeros_on(self._device)
        run_in(self._eager, partial(self._layers.rehearse_beside_prompts, layer, rows, place))

    def _scratch_for(self, splits: int, place: Place) -> DecodeScratch:
        spec = self._decoder.spec
        return DecodeScratch(splits, spec.num_heads, spec.num_kv_heads, spec.head_dim, place)


@torch.inference_mode()
def _attend_ahead(layers: Layers, eager: TorchMemory, device: torch.device, tokens: int) -> None:
    """Has cuDNN prepare for whole prompts, and waits for the device. In the memory and the mode of
    steps: what cuDNN prepares follows from what it is called with.

    Args:
        layers: whose attention it is.
        eager: what steps take memory from.
        device: the stage's.
        tokens: the prompts' padded length.
    """
    run_in(eager, partial(layers.attend_ahead, tokens, zeros_on(device)))
    torch.cuda.current_stream(device).synchronize()
