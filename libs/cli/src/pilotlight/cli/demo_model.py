"""The demo model: a small Llama that speaks, in the repository beside the code."""

from pathlib import Path

from pilotlight.cli.client import AdminClient
from pilotlight.common.errors import AlreadyExists, NotFound

DEMO_MODEL = "ember-7m"
DEMO_PROMPT = "What is a pilot light?"


def demo_model_folder() -> Path:
    """The model's folder: ``models/ember-7m`` of the checkout that this code runs from, or of the working directory.

    Raises:
        NotFound: neither has it, because Pilotlight was installed without its repository.
    """
    for base in (*Path(__file__).resolve().parents, Path.cwd()):
        folder = base / "models" / DEMO_MODEL
        if (folder / "config.json").is_file():
            return folder
    raise NotFound(f"the demo model models/{DEMO_MODEL} comes with the repository: run this from a checkout")


def ensure_demo_model(client: AdminClient) -> None:
    """Register it unless it already is."""
    body = {
        "name": DEMO_MODEL,
        "uri": demo_model_folder().as_uri(),
        "slo": {"ttft_ms": 5000, "tpot_ms": 200},
        "keep_alive_s": 300,
    }
    try:
        client.post("/models", body)
    except AlreadyExists:
        return
