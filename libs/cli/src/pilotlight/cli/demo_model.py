"""The demo model: a small Llama that speaks; it comes with Pilotlight."""

import contextlib
from pathlib import Path

from pilotlight.cli.client import AdminClient
from pilotlight.common.errors import AlreadyExists, ModelNotFound, NotFound
from pilotlight.common.shipped import shipped_folder

DEMO_MODEL = "ember-7m"
DEMO_PROMPT = "What is a pilot light?"


def demo_model_folder() -> Path:
    """The model's folder.

    Raises:
        NotFound: this installation came without it.
    """
    folder = shipped_folder("models") / DEMO_MODEL
    if not (folder / "config.json").is_file():
        raise NotFound(
            f"the demo model is not there: {folder} is missing. Run this from a checkout, or install the offline archive"
        )
    return folder


def ensure_demo_model(client: AdminClient) -> None:
    """Register it unless it already is.

    It is asked for first: what is refused is recorded in the audit log.
    """
    with contextlib.suppress(ModelNotFound):
        client.get(f"/models/{DEMO_MODEL}")
        return
    body = {
        "name": DEMO_MODEL,
        "uri": demo_model_folder().as_uri(),
        "slo": {"ttft_ms": 5000, "tpot_ms": 200},
        "keep_alive_s": 300,
    }
    # Another may have been quicker.
    with contextlib.suppress(AlreadyExists):
        client.post("/models", body)
