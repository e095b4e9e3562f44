"""A kernel that triton compiles for a Hopper GPU, wherever it runs."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("cuda", 90, 32)


@triton.jit
def scale(x, y, WIDTH: tl.constexpr):  # noqa: N803 - a constant
    column = tl.arange(0, WIDTH)
    tl.store(y + column, tl.load(x + column) * 2.0)


def compiled(width: int) -> tuple[bytes, bool]:
    """Its image, and whether it was compiled for it."""
    made = []
    hook = triton.knobs.compilation
    hook.listener = lambda **told: made.append(not told["cache_hit"])
    source = ASTSource(
        fn=scale,
        signature={"x": "*fp32", "y": "*fp32", "WIDTH": "constexpr"},
        constexprs={"WIDTH": width},
    )
    kernel = triton.compile(source, target=TARGET, options={"num_warps": 1})
    return kernel.asm["cubin"], made[-1]
