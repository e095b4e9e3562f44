"""Checkpoints with fp8 weights, as two publishing tools leave them: registered, loaded, asked; and
one that is quantized otherwise.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, running
from fp8_models import FORMATS, quantized_weight
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

QUESTION = [{"role": "user", "content": "What is a pilot light?"}]
SUFFIXES = {"fp8-block": "_scale_inv", "compressed-channel": "_scale"}
PADDED_WIDTH = 768
"""Of the feed-forward network, so that it has whole blocks; what is added is zeros."""


def write_quantized(folder: Path, form: str) -> None:
    """The demo model in a published format."""
    folder.mkdir()
    for path in DEMO_FOLDER.iterdir():
        if path.name.startswith(("tokenizer", "generation")):
            shutil.copy(path, folder)
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    beyond = PADDED_WIDTH - config["intermediate_size"]
    config |= {"intermediate_size": PADDED_WIDTH, "quantization_config": FORMATS[form]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(DEMO_FOLDER / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        if "mlp" in name:
            tensor = pad(tensor, (0, beyond) if "down_proj" in name else (0, 0, 0, beyond))
        tensors[name], tensors[name + SUFFIXES[form]] = quantized_weight(tensor, form)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSystem]:
    place: Path = tmp_path_factory.mktemp("fp8")
    place.chmod(0o755)
    for form in SUFFIXES:
        write_quantized(place / form, form)
    other = place / "gptq"
    shutil.copytree(place / "fp8-block", other)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (other / "config.json").write_text(json.dumps(config))
    roots = {"PILOTLIGHT_MODEL_ROOTS": f"{place},{DEMO_FOLDER}"}
    with running(place / "home", environment=roots) as started:
        yield started


def ask(system: RunningSystem, model: str) -> str:
    """The greedy answer."""
    with system.openai() as client:
        answer = client.chat.completions.create(
            model=model,
            messages=QUESTION,
            temperature=0,
            max_tokens=32,
        )
    return str(answer.choices[0].message.content)


def test_published_formats_are_served_and_others_refused_by_name(system: RunningSystem) -> None:
    roots = system.home.parent
    system.cli("model", "add", "plain", str(DEMO_FOLDER))
    known = ask(system, "plain")
    for form in SUFFIXES:
        system.cli("model", "add", form, str(roots / form))
        answer = ask(system, form)
        # fp8 moves what is nearly equal; the first words of a trained model are not.
        assert answer.split()[:4] == known.split()[:4]
        assert "light" in answer
    refused = system.cli("model", "add", "other", str(roots / "gptq"), status=1)
    assert "quant_method gptq" in json.dumps(refused)
