import pytest

import image_requirements


@pytest.mark.parametrize("service", image_requirements.OF_IMAGE)
def test_an_image_holds_what_its_service_needs_and_no_more(service: str) -> None:
    members, packages = image_requirements.needs(service)
    names = {folder.name for folder in members}
    assert "common" in names
    torch = [package for package in packages if image_requirements.split(package)[0] == "torch"]
    assert bool(torch) == ("engine" in names) == (service == "node")
    assert "cli" not in names
    services = {folder.name for folder in members if folder.parent.name == "services"}
    assert services == {"setup": set(), "node": {"loader", "worker"}}.get(service, {service})
    assert not [package for package in packages if package.startswith("pilotlight")]


def test_requirements() -> None:
    assert image_requirements.split("psycopg[binary]") == ("psycopg", ("binary",))
    assert image_requirements.split("pilotlight-worker[native,x]") == (
        "pilotlight-worker",
        ("native", "x"),
    )
    assert image_requirements.split("uvloop>=0.22") == ("uvloop", ())
    with pytest.raises(ValueError, match="no requirement"):
        image_requirements.split(">=1")


def test_an_unknown_service_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["image_requirements.py", "packages", "gatway"])
    assert image_requirements.main() == 2
    assert "'gatway' is not one of setup, gateway" in capsys.readouterr().err
