"""fp8 beside bfloat16: what the same rows of ``bench/engine_gpu.py`` are to each other where a run
has measured a shape in both.
"""

from collections.abc import Mapping
from typing import Any

from engine_gpu_job import QUANTIZED

FLOORS = {"decode, batch 1": 1.4, "decode, batch 64": 1.2}
"""How many times faster than our own bfloat16 fp8 has to be."""


def plain_of(shape: str) -> str:
    """The same shape with weights in bfloat16."""
    return shape.partition("-fp8")[0]


def beside_bfloat16(shapes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each row of a quantized shape that its plain shape has, too.

    ``ratios`` are times as fast as our bfloat16, whatever the unit: ``ours`` and, where there is
    one, vLLM's fp8.
    """
    lines: list[dict[str, Any]] = []
    for shape in (name for name in shapes if name in QUANTIZED and plain_of(name) in shapes):
        plain = {row["row"]: row for row in shapes[plain_of(shape)]["rows"]}
        for row in shapes[shape]["rows"]:
            if row["row"] not in plain:
                continue
            base, more_is_better = plain[row["row"]]["ours"], row["unit"] == "tokens/s"
            engines = {name: row[name] for name in ("ours", "vllm") if name in row}
            ratios = {
                name: round(figure / base if more_is_better else base / figure, 3)
                for name, figure in engines.items()
            }
            line = {"shape": shape, "row": row["row"], "unit": row["unit"], "ours_bfloat16": base}
            line |= {f"{name}_fp8": figure for name, figure in engines.items()}
            line["ratios"] = ratios
            if row["row"] in FLOORS:
                floor = FLOORS[row["row"]]
                line["floor"] = {"ratio": floor, "met": ratios["ours"] >= floor}
            lines.append(line)
    return lines


def below_floors(lines: list[dict[str, Any]]) -> list[str]:
    """What is slower than it has to be."""
    return [
        f"{line['shape']}: {line['row']}: {line['ratios']['ours']} of our bfloat16, below {line['floor']['ratio']}"
        for line in lines
        if "floor" in line and not line["floor"]["met"]
    ]
