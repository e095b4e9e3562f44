"""Where an installation looks for what comes beside the code."""

from pathlib import Path

from pilotlight.cli.demo_model import demo_model_folder
from pilotlight.common.shipped import shipped_folder

ROOT = Path(__file__).resolve().parents[3]


def test_a_checkout_has_it_at_its_root() -> None:
    code = Path("/src/light/libs/common/src/pilotlight/common/shipped.py")
    assert shipped_folder("migrations", code=code, prefix=Path("/venv")) == Path(
        "/src/light/migrations"
    )


def test_an_installation_has_it_in_its_environment() -> None:
    code = Path("/venv/lib/python3.12/site-packages/pilotlight/common/shipped.py")
    assert shipped_folder("models", code=code, prefix=Path("/venv")) == Path(
        "/venv/share/pilotlight/models"
    )
    assert shipped_folder("models", code=Path("/x/shipped.py"), prefix=Path("/venv")) == Path(
        "/venv/share/pilotlight/models"
    )


def test_the_folders_that_code_asks_for_are_there() -> None:
    assert (shipped_folder("migrations") / "env.py").is_file()
    assert (demo_model_folder() / "config.json").is_file()
