"""Writing the trained model in the layout that transformers and every serving engine read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo_model.model import DemoModel
from demo_model.tokenizer import BOS, END, PAD, SPECIAL_TOKENS, tokenizer_config


def export_model(model: DemoModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write configuration, weights (bfloat16) and tokenizer into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.named_parameters()
    }
    weights_path = folder / "model.safetensors"
    save_file(weights, weights_path, metadata={"format": "pt"})
    # The library makes it readable by its owner alone.
    weights_path.chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", model.shape.hf_config())
    _write_json(folder / "tokenizer_config.json", tokenizer_config())
    _write_json(folder / "generation_config.json", _generation_config())


def _generation_config() -> dict[str, object]:
    return {
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "do_sample": False,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
