"""``pilotlight materialize`` at a terminal: its bar shows the build's step, and a build that fails
ends it with its reason.
"""

import io
from typing import Any, cast

import pytest
from rich.console import Console

from pilotlight.cli import materializing
from pilotlight.cli.client import AdminClient
from pilotlight.cli.materializing import materialize
from pilotlight.common.clock import ManualClock
from pilotlight.common.errors import DeadlineExceeded, PilotlightError

MANIFEST = {"fingerprint": "f1", "kind": "manifest", "prefill_tokens_per_s": 1234.5}


def building(step: str, share: float) -> dict[str, Any]:
    return {"state": "building", "step": step, "share": share}


WAITING = {"state": "waiting", "reason": "no_room: waiting for room: 7 bytes of w1"}


def materials(*builds: dict[str, Any], artifacts: tuple[Any, ...] = ()) -> dict[str, Any]:
    return {"asked_at": "2026-01-01T00:00:00", "builds": list(builds), "artifacts": list(artifacts)}


class Gateway:
    """Answers one after the other; the last one again and again."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def post(self, path: str) -> dict[str, Any]:
        self.asked.append(path)
        return self.answers.pop(0)

    def get(self, path: str) -> dict[str, Any]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    made = io.StringIO()
    drawn = Console(file=made, force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr(materializing, "errors", drawn)
    return made


def run(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, wait_s: float = 60.0) -> int:
    clock = ManualClock()
    monkeypatch.setattr(materializing, "block", clock.advance)
    client = cast("AdminClient", gateway)
    return materialize(client, "a model", clock, wait_s, as_json=False)


def test_the_bar_shows_each_step_of_the_build(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(Gateway):
        """The bar is drawn between two answers, not when the thread that draws it has time."""

        def get(self, path: str) -> dict[str, Any]:
            drawn = [one for one in bars if one.live.is_started]
            for one in drawn:
                one.refresh()
            return super().get(path)

    bars: list[Any] = []
    make = materializing.Progress

    def kept(*columns: Any, **more: Any) -> Any:
        bars.append(make(*columns, **more))
        return bars[-1]

    monkeypatch.setattr(materializing, "Progress", kept)
    gateway = Slow(
        materials(),
        materials(WAITING),
        materials(building("prefill", 0.3)),
        materials(building("graphs", 0.72)),
        materials(artifacts=(MANIFEST,)),
    )
    assert run(gateway, monkeypatch) == 0
    assert gateway.asked == ["/models/a%20model/materialize"]
    drawn = screen.getvalue()
    places = [drawn.index(word) for word in ("waits for time", "7 bytes", "prefill", "graphs")]
    assert places == sorted(places)
    assert (
        "a model is materialized after 1.2 s; prompts at 1,234 tokens/s" in capsys.readouterr().out
    )


def test_what_its_profile_says_of_loads_is_told(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {**MANIFEST, "load_bytes_per_s": 2.5e9, "init_s": 1.5, "restore_s": 0.25}
    assert run(Gateway(materials(artifacts=(measured,))), monkeypatch) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "prompts at 1,234 tokens/s; from a node's memory at 2,384 MiB/s, and 0.250 s beside that "
        "in the place of 1.500 s" in told
    )


def test_what_is_there_is_told_at_once(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Gateway(materials(artifacts=(MANIFEST,))), monkeypatch) == 0
    assert "has been materialized before" in capsys.readouterr().out


def test_a_build_that_fails_ends_it_with_its_reason(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {
        "state": "failed",
        "changed_at": "2026-01-01T00:00:01",
        "reason": "engine_failed: it ended",
    }
    before = {**failed, "changed_at": "2025-12-31T00:00:00"}
    gateway = Gateway(materials(before), materials(before), materials(failed))
    with pytest.raises(PilotlightError, match="it ended") as refused:
        run(gateway, monkeypatch)
    assert refused.value.code == "engine_failed"


def test_it_waits_no_longer_than_it_may(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeadlineExceeded, match="its build goes on"):
        run(Gateway(materials(), materials(building("load", 0.2))), monkeypatch, wait_s=1.0)
    with pytest.raises(DeadlineExceeded, match=r"goes on later \(waiting for room: 7 bytes of w1"):
        run(Gateway(materials(), materials(WAITING)), monkeypatch, wait_s=1.0)
