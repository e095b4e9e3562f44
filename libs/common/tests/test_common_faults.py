import pytest

from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.faults import Faults
from pilotlight.common.settings import ServiceSettings


@pytest.mark.anyio
async def test_delays_are_at_their_points_alone() -> None:
    faults = Faults.parse(" fetch=0.01, load=2 ,")
    assert (faults.delay_s("fetch"), faults.delay_s("load"), faults.delay_s("prefill")) == (
        0.01,
        2.0,
        0.0,
    )
    await faults.delay("fetch")
    await faults.delay("prefill")
    assert Faults.parse("") == Faults()


@pytest.mark.parametrize(
    "text", ["fetch", "fetch=x", "fetch=-1", "fetch=nan", "lunch=1", "fetch=99999"]
)
def test_a_wrong_setting_is_refused_at_start(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Faults.parse(text)
    with pytest.raises(SettingsInvalid, match="PILOTLIGHT_FAULTS"):
        ServiceSettings(faults=text)
