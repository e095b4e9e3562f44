from pathlib import Path

import pytest

from pilotlight.common.errors import SettingsInvalid
from pilotlight.common.machine import memory_bytes
from pilotlight.loader.identity import default_pool_bytes, load_epoch, node_id_of, save_epoch
from pilotlight.loader.settings import LoaderSettings
from pilotlight.policy.ids import Epoch


def test_a_node_keeps_its_id(tmp_path: Path) -> None:
    state = tmp_path / "state"
    node_id = node_id_of(state)
    assert node_id.startswith("node-")
    assert node_id_of(state) == node_id
    assert node_id_of(tmp_path / "other") != node_id


def test_the_highest_epoch_outlives_the_pool(tmp_path: Path) -> None:
    assert load_epoch(tmp_path) == 0
    save_epoch(tmp_path, Epoch(12))
    assert load_epoch(tmp_path) == 12


def test_memory_is_known() -> None:
    assert memory_bytes() > 1 << 20
    assert 0 < default_pool_bytes(Path("/dev/shm")) <= memory_bytes() // 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"link": "fast"},
        {"pool_bytes": 1000},
        {"workers": -1},
        {"worker_kind": "tpu"},
        {"nic_bandwidth": "0"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(SettingsInvalid, match=f"^PILOTLIGHT_{next(iter(wrong)).upper()}: .*"):
        LoaderSettings(**wrong)


def test_placement_counts_with_the_slower_of_interface_and_link() -> None:
    assert LoaderSettings(link="200mbit").nic_bytes_per_s == 25e6
    assert LoaderSettings(link="", nic_bandwidth="25gbit").nic_bytes_per_s == 3.125e9


def test_an_empty_folder_is_no_disk_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_DISK_TIER_DIR", "")
    assert LoaderSettings().disk_tier_dir is None
    monkeypatch.setenv("PILOTLIGHT_DISK_TIER_DIR", "/var/lib/tier")
    assert LoaderSettings().disk_tier_dir == Path("/var/lib/tier")


def test_the_pools_memory_is_taken_ahead_as_the_workers_say_unless_it_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for written, meant in (("", None), ("true", True), ("false", False)):
        monkeypatch.setenv("PILOTLIGHT_POOL_AHEAD", written)
        assert LoaderSettings().pool_ahead is meant
