"""Packing documents into rows, and the training loop."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo_model.corpus import documents
from demo_model.model import DemoModel, ModelShape
from demo_model.tokenizer import CONTEXT_TOKENS, Encoded, encode_documents

_SHARD_DOCUMENTS = 10_000
_IGNORED = -100
_NO_DOCUMENT = -1


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """How long and how fast to learn."""

    seed: int = 7
    steps: int = 7_000
    rows_per_step: int = 64
    documents: int = 600_000
    peak_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    report_every_steps: int = 100

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a fiftieth, so that the last steps settle."""
        if step < self.warmup_steps:
            return self.peak_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed documents, each tensor [rows, CONTEXT_TOKENS], of 16 bits to keep a large corpus
    small.
    """

    ids: Tensor
    targets: Tensor
    document: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the loop reports."""

    step: int
    loss: float


def build_rows(tokenizer: Tokenizer, plan: TrainingPlan, processes: int) -> Rows:
    """Generate, encode and pack the whole corpus; the result does not depend on the number of
    processes.
    """
    shards = range(math.ceil(plan.documents / _SHARD_DOCUMENTS))
    work = partial(_build_shard, tokenizer.to_str(), plan.seed)
    # Spawned, not forked: a fork would inherit the locks of whatever threads the tokenizer has
    # started.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        packed = np.concatenate(pool.map(work, shards, chunksize=1), axis=1)
    ids, learned, document = (torch.from_numpy(part) for part in packed)
    # A target counts if the model should say it and if it belongs to the document of the token
    # before it.
    counts = learned[:, 1:].bool() & (document[:, 1:] == document[:, :-1])
    targets = torch.where(counts, ids[:, 1:], _IGNORED)
    return Rows(ids[:, :-1], targets, document[:, :-1])


def _build_shard(tokenizer_json: str, seed: int, shard: int) -> npt.NDArray[np.int16]:
    """One shard as [3, rows, CONTEXT_TOKENS + 1]: token ids, learned flags, number of the document
    in its row.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    # The tokenizer learns from the documents of `seed` itself; no shard shares them.
    source = list(documents(seed * 1_000_003 + shard + 1, _SHARD_DOCUMENTS))
    rows = list(_pack(encode_documents(tokenizer, source)))
    packed = np.zeros((3, len(rows), CONTEXT_TOKENS + 1), dtype=np.int16)
    packed[2] = _NO_DOCUMENT
    for index, row in enumerate(rows):
        at = 0
        for number, encoded in enumerate(row):
            end = at + len(encoded.ids)
            packed[0, index, at:end] = encoded.ids
            packed[1, index, at:end] = encoded.learned
            packed[2, index, at:end] = number
            at = end
    return packed


def _pack(encoded: list[Encoded]) -> Iterator[list[Encoded]]:
    """Fill rows in order; a document is never cut, and one that is longer than the context is left
    out.
    """
    row: list[Encoded] = []
    used = 0
    for document in encoded:
        length = len(document.ids)
        if length > CONTEXT_TOKENS:
            continue
        if used + length > CONTEXT_TOKENS:
            yield row
            row, used = [], 0
        row.append(document)
        used += length
    yield row


def train(
    rows: Rows,
    shape: ModelShape,
    plan: TrainingPlan,
    device: torch.device,
    report: Callable[[Progress], None],
) -> DemoModel:
    """Train from scratch; weights stay in float32, and products run in bfloat16 on a GPU."""
    torch.manual_seed(plan.seed)
    on_gpu = device.type == "cuda"
    model = DemoModel(shape).to(device)
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, plan.weight_decay), betas=(0.9, 0.98), fused=on_gpu
    )
    loss_of = torch.compile(_loss) if on_gpu else _loss
    batches = _batches(rows, plan)
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step)
        batch = next(batches)
        ids, targets, document = (
            part.to(device).long() for part in (batch.ids, batch.targets, batch.document)
        )
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss = loss_of(model, ids, targets, document)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % plan.report_every_steps == 0 or step + 1 == plan.steps:
            report(Progress(step + 1, loss.item()))
    return model


def _loss(model: DemoModel, ids: Tensor, targets: Tensor, document: Tensor) -> Tensor:
    logits = model(ids, document)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=_IGNORED
    )


def _parameter_groups(model: DemoModel, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay, norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def _batches(rows: Rows, plan: TrainingPlan) -> Iterator[Rows]:
    """Shuffled batches without end; each epoch has its own order."""
    generator = torch.Generator().manual_seed(plan.seed)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for chosen in order.split(plan.rows_per_step):
            # A last, smaller batch would make the compiled step compile again.
            if len(chosen) == plan.rows_per_step or len(rows) < plan.rows_per_step:
                yield Rows(rows.ids[chosen], rows.targets[chosen], rows.document[chosen])
