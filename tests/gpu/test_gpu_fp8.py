"""Kernels for fp8 weights against the same computation on the CPU, and whole models with them
against transformers.
"""

import gc
from collections.abc import Callable, Generator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="it comes with torch's builds for CUDA alone")

from float64_reference import close
from fp8_models import FORMATS, QuantizedModel, quantized_model
from random_models import source_of

from pilotlight.engine.core.batch import Batch, Segment
from pilotlight.engine.cuda.arena import CudaArena
from pilotlight.engine.cuda.attention_metadata import fields_of, send, zeros_on
from pilotlight.engine.cuda.capture import CaptureOnSecondUse
from pilotlight.engine.cuda.graphs import GraphSet
from pilotlight.engine.cuda.kernels import elementwise
from pilotlight.engine.cuda.kernels.decode_attention import DecodeScratch, decode_attention
from pilotlight.engine.cuda.kernels.fp8 import Fp8Kernels, GemmTiling, padded_tokens
from pilotlight.engine.cuda.kernels.fp8_rows import Quantized
from pilotlight.engine.cuda.kernels.gemv import Gemv
from pilotlight.engine.cuda.kernels.parts import Parts
from pilotlight.engine.cuda.kernels.prefill_attention import prefill_attention
from pilotlight.engine.cuda.runner import CudaRangeRunner
from pilotlight.engine.cuda.tilings import BLOCK_GEMM_TILINGS, ROW_GEMM_TILINGS
from pilotlight.engine.device.kv import KvCache
from pilotlight.engine.device.memory import StageMemory
from pilotlight.engine.device.parameters import Parameters
from pilotlight.engine.models.layers import rms_norm
from pilotlight.engine.models.quantized import dequantize, quantize
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import Dtype

pytestmark = pytest.mark.gpu

ROWS = (2, 16, 17, 64, 130)
NO_WORSE = 1.2
"""See ``libs/engine/tests/test_fp8.py``."""


def values_of(rows: Quantized) -> Tensor:
    """What quantized rows mean."""
    group = rows.values.shape[1] // rows.scales.shape[0]
    wide = rows.values.double() * rows.scales.double().t().repeat_interleave(group, dim=1)
    return wide[: rows.rows].cpu()


def meant(x: Tensor, group: int) -> Tensor:
    """The same by the CPU."""
    values, scales = quantize(x.cpu(), group)
    return values.double() * scales.double().repeat_interleave(group, dim=1)


def same_but_for_ties(found: Tensor, expected: Tensor) -> None:
    """Values that lie between two of fp8 may fall to either side: a quotient is rounded otherwise,
    and so is a scale.
    """
    apart = (found - expected).abs()
    assert float((apart > 1e-6 * expected.abs()).double().mean()) < 3e-2
    assert bool((apart <= 0.13 * expected.abs() + 1e-3).all())


@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_quantized_behind_norm_and_gates(
    device: torch.device, fresh: Callable[..., Tensor], rows: int, by_block: bool
) -> None:
    hidden = 384
    kernels = Fp8Kernels(by_block, {})
    group = 128 if by_block else hidden
    residual, x, norm, gates_ups = (
        fresh(*shape).bfloat16().to(device)
        for shape in ((rows, hidden), (rows, hidden), (hidden,), (rows, 2 * hidden))
    )
    ours, plain = residual.clone(), residual.clone()
    found = kernels.add_norm(ours, x, norm, 1e-5)
    normed = elementwise.add_norm(plain, x, norm, 1e-5)
    assert torch.equal(ours, plain)
    same_but_for_ties(values_of(found), meant(normed, group))
    opened = elementwise.silu_mul(gates_ups)
    same_but_for_ties(values_of(kernels.silu_mul(gates_ups)), meant(opened, group))
    same_but_for_ties(values_of(kernels.quantize(opened)), meant(opened, group))


def test_parts_of_a_sum_are_added_before_the_norm(
    device: torch.device, fresh: Callable[..., Tensor]
) -> None:
    kernels = Fp8Kernels(True, {})
    parts = Parts(fresh(3, 16, 384).float().to(device), 5)
    residual, norm = (fresh(*shape).bfloat16().to(device) for shape in ((5, 384), (384,)))
    ours, plain = residual.clone(), residual.clone()
    found = kernels.add_norm(ours, parts, norm, 1e-5)
    expected = kernels.add_norm(plain, parts.total(torch.bfloat16), norm, 1e-5)
    close(ours, plain.cpu().double(), torch.bfloat16)
    close(found.scales[:, :5], expected.scales[:, :5].cpu().double(), torch.bfloat16)


@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "tiling",
    [
        GemmTiling(64, 1, 4, 4),
        GemmTiling(64, 1, 8, 4, tokens=32),
        GemmTiling(64, 2, 4, 3, tokens=64),
        GemmTiling(128, 3, 8, 3, 64),
    ],
)
def test_a_product_of_rows(
    device: torch.device,
    fresh: Callable[..., Tensor],
    rows: int,
    by_block: bool,
    tiling: GemmTiling,
) -> None:
    wide, width = 256, 640
    kernels = Fp8Kernels(by_block, {(wide, width, padded_tokens(rows)): tiling})
    shape = (wide // 128, width // 128) if by_block else (wide, 1)
    weight = fresh(wide, width, scale=40).to(torch.float8_e4m3fn)
    scales = (fresh(*shape).abs() + 0.5).float()
    made = kernels.quantize(fresh(rows, width).bfloat16().to(device))
    exact = values_of(made) @ dequantize(weight, scales, torch.float64).T
    for divisible in (False, True):
        found = kernels.product(
            made, weight.to(device), scales.to(device), torch.bfloat16, divisible=divisible
        )
        assert isinstance(found, Parts) == (divisible and tiling.splits > 1)
        whole = found.total(torch.bfloat16) if isinstance(found, Parts) else found
        close(whole, exact, torch.bfloat16)


@pytest.mark.parametrize(
    ("by_block", "shape"),
    [(True, shape) for shape in BLOCK_GEMM_TILINGS]
    + [(False, shape) for shape in ROW_GEMM_TILINGS],
)
def test_measured_tilings_give_their_products(
    device: torch.device, by_block: bool, shape: tuple[int, int, int]
) -> None:
    wide, width, padded = shape
    kernels = Fp8Kernels(by_block, BLOCK_GEMM_TILINGS if by_block else ROW_GEMM_TILINGS)
    weight = (torch.randn(wide, width, device=device) * 40).to(torch.float8_e4m3fn)
    of_scales = (wide // 128, width // 128) if by_block else (wide, 1)
    scales = torch.rand(of_scales, device=device) + 0.5
    made = kernels.quantize(torch.randn(padded - 3, width, device=device, dtype=torch.bfloat16))
    found = kernels.product(made, weight, scales, torch.bfloat16, divisible=True)
    whole = found.total(torch.bfloat16) if isinstance(found, Parts) else found
    exact = values_of(made).to(device) @ dequantize(weight, scales, torch.float64).T
    close(whole, exact.cpu(), torch.bfloat16)


@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize("rows", [65, 200, 1025])
def test_a_product_of_many_rows(
    device: torch.device,
    fresh: Callable[..., Tensor],
    rows: int,
    by_block: bool,
) -> None:
    """On a Hopper device, cuBLAS's."""
    wide, width = 384, 1024
    kernels = Fp8Kernels(by_block, {})
    shape = (wide // 128, width // 128) if by_block else (wide, 1)
    weight = fresh(wide, width, scale=40).to(torch.float8_e4m3fn)
    scales = (fresh(*shape).abs() + 0.5).float()
    made = kernels.quantize(fresh(rows, width).bfloat16().to(device))
    found = kernels.product(
        made, weight.to(device), scales.to(device), torch.bfloat16, divisible=False
    )
    assert isinstance(found, Tensor)
    close(found, values_of(made) @ dequantize(weight, scales, torch.float64).T, torch.bfloat16)


@pytest.mark.parametrize("tiling", [GemmTiling(128, 1, 8, 3, 128), GemmTiling(64, 2, 8, 3, 256)])
def test_large_tiles_of_tokens(
    device: torch.device, fresh: Callable[..., Tensor], tiling: GemmTiling
) -> None:
    kernels = Fp8Kernels(True, {(256, 640, 256): tiling})
    weight = fresh(256, 640, scale=40).to(torch.float8_e4m3fn)
    scales = (fresh(2, 5).abs() + 0.5).float()
    made = kernels.quantize(fresh(250, 640).bfloat16().to(device))
    found = kernels.product(
        made, weight.to(device), scales.to(device), torch.bfloat16, divisible=True
    )
    whole = found.total(torch.bfloat16) if isinstance(found, Parts) else found
    close(whole, values_of(made) @ dequantize(weight, scales, torch.float64).T, torch.bfloat16)


@pytest.mark.parametrize("spans", [[(4, 5), (39, 40), (700, 701)], [(0, 70), (17, 167), (30, 31)]])
def test_attention_quantizes_heads_as_the_kernel_behind_it_would(
    device: torch.device, fresh: Callable[..., Tensor], spans: list[tuple[int, int]]
) -> None:
    heads, kv_heads, dim = 4, 2, 128
    kernels = Fp8Kernels(True, {})
    cache = tuple(fresh(150 * 16, kv_heads, dim).bfloat16().to(device) for _ in range(2))
    segments = (
        Segment(start, stop - start, tuple(range(50 * number, 50 * number + 50)), True)
        for number, (start, stop) in enumerate(spans)
    )
    batch = Batch(tuple(segments))
    step = send(fields_of(batch, 8, None), device)
    queries = fresh(batch.num_tokens, heads, dim).bfloat16().to(device)
    rooms = (
        queries.new_empty(batch.num_tokens, heads * dim),
        kernels.room_for_heads(queries, heads * dim, dim),
    )
    for room in rooms:
        scratch = DecodeScratch(16, heads, kv_heads, dim, zeros_on(device))
        assert step.splits is not None
        decode_attention(queries, cache, step.rows, step.splits, scratch, 0.1, room)
        if step.chunks is not None:
            prefill_attention(queries, cache, step.rows, step.chunks, 0.1, room)
    plain, quantized = rooms
    assert isinstance(plain, Tensor)
    assert isinstance(quantized, Quantized)
    expected = kernels.quantize(plain)
    assert torch.equal(
        quantized.scales[:, : batch.num_tokens], expected.scales[:, : batch.num_tokens]
    )
    assert torch.equal(values_of(quantized), values_of(expected))


@pytest.mark.parametrize("by_block", [True, False])
def test_heads_that_share_a_scale_are_quantized_behind_attention(
    device: torch.device, fresh: Callable[..., Tensor], by_block: bool
) -> None:
    room = Fp8Kernels(by_block, {}).room_for_heads(fresh(3, 8).bfloat16().to(device), 512, 64)
    assert isinstance(room, Tensor)
    assert room.shape == (3, 512)


@pytest.mark.parametrize("width", [48, 208])
def test_a_product_of_rows_that_are_no_whole_blocks(
    device: torch.device, fresh: Callable[..., Tensor], width: int
) -> None:
    kernels = Fp8Kernels(False, {})
    weight = fresh(72, width, scale=40).to(torch.float8_e4m3fn)
    scales = (fresh(72, 1).abs() + 0.5).float()
    made = kernels.quantize(fresh(5, width).bfloat16().to(device))
    found = kernels.product(
        made, weight.to(device), scales.to(device), torch.bfloat16, divisible=False
    )
    assert isinstance(found, Tensor)
    close(found, values_of(made) @ dequantize(weight, scales, torch.float64).T, torch.bfloat16)


@pytest.mark.parametrize("by_block", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(256, 640), (384, 2560)])
def test_one_row_times_a_matrix(
    device: torch.device, fresh: Callable[..., Tensor], rows: int, width: int, by_block: bool
) -> None:
    multiply = Gemv(1e-5, {})
    x, norm, residual = (fresh(*shape).bfloat16() for shape in ((1, width), (width,), (1, rows)))
    shape = (2 * rows // 128, width // 128) if by_block else (2 * rows, 1)
    both = fresh(2 * rows, width, scale=40).to(torch.float8_e4m3fn)
    scales = ((fresh(*shape).abs() + 0.5) / 40).float()
    half = scales[: scales.shape[0] // 2]
    exact = dequantize(both, scales, torch.float64)
    there = {
        name: tensor.to(device, copy=True)
        for name, tensor in (("x", x), ("norm", norm), ("both", both), ("scales", scales))
    }
    found = multiply(
        both[:rows].to(device),
        there["x"],
        residual=residual.to(device),
        scales=half.to(device),
    )
    close(found, x.double() @ exact[:rows].T + residual.double(), torch.bfloat16)
    gates, ups = (rms_norm(x, norm, 1e-5).double() @ exact.T).chunk(2, dim=-1)
    found = multiply(
        there["both"], there["x"], norm=there["norm"], gated=True, scales=there["scales"]
    )
    close(found, torch.nn.functional.silu(gates) * ups, torch.bfloat16)


@pytest.fixture
def on_device(device: torch.device) -> Generator[CudaArena]:
    arena = CudaArena(device.index)
    yield arena
    gc.collect()
    torch.cuda.synchronize()
    arena.close()


def rows_of(arena: CudaArena, model: QuantizedModel, tokens: list[int], ends: list[int]) -> Tensor:
    """Logits of a prompt after each of its ends: in chunks, the last ones of a single token."""
    memory = StageMemory(arena, decoder_of(model.spec), model.spec.whole, Dtype.BFLOAT16)
    parameters = Parameters(memory)
    for part, tensors in enumerate(model.parts()):
        parameters.place(part, {name: source_of(one) for name, one in tensors.items()}, lambda: 0.0)
    scratch = memory.scratch()
    assert scratch is not None
    graphs = GraphSet(arena.device, scratch, CaptureOnSecondUse(arena.device, scratch))
    runner = CudaRangeRunner(memory, parameters, KvCache(memory, 64), scratch.eager, graphs=graphs)
    found: list[Tensor] = []
    try:
        for start, stop in zip([0, *ends], ends, strict=False):
            segment = Segment(start, stop - start, tuple(range(64)), True)
            inputs = torch.tensor(tokens[start:stop])
            found.append(runner.run(Batch((segment,)), inputs).clone())
        return torch.cat(found).cpu()
    finally:
        del runner
        graphs.close()
        memory.close()


def error(found: Tensor, exact: Tensor) -> float:
    """Relative to the whole."""
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["llama-bias", "qwen3"])
def test_logits_are_as_close_as_those_of_transformers(
    on_device: CudaArena, kind: str, form: str
) -> None:
    model = quantized_model(kind, form, Dtype.BFLOAT16)
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(199, (240,), generator=generator).tolist()
    ends = [*range(7, 200, 11), *range(200, 230)]
    places = [end - 1 for end in ends]
    exact, theirs = (one.logits(tokens)[places] for one in (model.widened(), model))
    found = rows_of(on_device, model, tokens, ends)
    assert error(found, exact) < NO_WORSE * error(theirs, exact)
