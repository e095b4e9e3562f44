"""``pilotlight replay FILE``: a decision log through ``tick`` again, identical or not."""

from pathlib import Path

from pilotlight.cli.output import console, emit_json
from pilotlight.common.decision_replay import replay
from pilotlight.common.policy_version import policy_version


def show(path: Path, *, as_json: bool) -> int:
    """Replay and say what came of it; status 1 where something came out differently.

    Raises:
        BadRequest: the file is no decision log.
    """
    found = replay(path)
    difference, ours = found.difference, policy_version()
    if as_json:
        emit_json(
            {
                "identical": found.identical,
                "ticks": found.ticks,
                "decisions": found.decisions,
                "logged_version": found.logged_version,
                "replayed_version": ours,
                "difference": None
                if difference is None
                else {
                    "tick": difference.tick,
                    "now_s": difference.now_s,
                    "then": list(difference.then),
                    "again": list(difference.again),
                },
            }
        )
        return 0 if found.identical else 1
    if found.logged_version != ours:
        console.print(f"the log is of policies {found.logged_version}, these are {ours}")
    if difference is None:
        console.print(f"{found.ticks} ticks with {found.decisions} decisions: identical")
        return 0
    console.print(f"tick {difference.tick} at {difference.now_s:.3f} s comes out differently")
    for heading, lines in (("then", difference.then), ("again", difference.again)):
        console.print(f"{heading}:")
        for line in lines or ("no decision; other holds",):
            console.print(f"  {line}", markup=False, soft_wrap=True)
    return 1
