import json
import os
import stat
from pathlib import Path

from pilotlight.common.credentials import HOLDERS, NATS_USERS, SECRETS_OF, hand_out


def listed(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text().strip() for path in folder.iterdir()}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_each_holder_gets_its_own_and_no_more(tmp_path: Path) -> None:
    hand_out(tmp_path)
    known = listed(tmp_path / "all")
    for holder, names in HOLDERS.items():
        extra = {"pgpass"} if holder == "migrations" else set[str]()
        held = listed(tmp_path / holder)
        assert held.keys() == set(names) | extra
        assert all(held[name] == known[name] for name in names)
    assert set(SECRETS_OF) - {"loader"} <= set(HOLDERS)
    assert len(set(known.values())) == len(known)


def test_modes(tmp_path: Path) -> None:
    """The group reads, for servers with a user of their own; a password file for libpq must be its
    owner's alone.
    """
    hand_out(tmp_path)
    assert mode(tmp_path / "postgres" / "postgres-owner") == 0o440
    assert mode(tmp_path / "migrations" / "pgpass") == 0o400
    assert mode(tmp_path / "all" / "cluster-key") == 0o600


def test_servers_are_configured_for_the_same_secrets(tmp_path: Path) -> None:
    hand_out(tmp_path)
    known = listed(tmp_path / "all")
    config = json.loads((tmp_path / "nats" / "nats-server.conf").read_text())
    users = {user["user"]: user["password"] for user in config["authorization"]["users"]}
    assert users == {user: known[f"nats-{user}"] for user in NATS_USERS}
    assert config["http"] == "127.0.0.1:8222"
    (identity,) = json.loads((tmp_path / "s3" / "s3.json").read_text())["identities"]
    assert identity["credentials"] == [
        {"accessKey": known["s3-access-key"], "secretKey": known["s3-secret-key"]}
    ]
    assert known["postgres-owner"] in (tmp_path / "migrations" / "pgpass").read_text()


def test_again_changes_nothing(tmp_path: Path) -> None:
    hand_out(tmp_path)
    before = {str(path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    hand_out(tmp_path)
    assert {str(path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_replaced_secret_reaches_its_holders_and_a_taken_one_leaves(tmp_path: Path) -> None:
    hand_out(tmp_path)
    (tmp_path / "all" / "postgres-cache").write_text("another\n")
    (tmp_path / "cache" / "cluster-key").write_text("of an earlier release\n")
    hand_out(tmp_path)
    assert listed(tmp_path / "cache")["postgres-cache"] == "another"
    assert listed(tmp_path / "migrations")["postgres-cache"] == "another"
    assert "cluster-key" not in listed(tmp_path / "cache")


def test_what_an_operator_brings_reaches_those_who_read_sources(tmp_path: Path) -> None:
    hand_out(tmp_path)
    assert not list(tmp_path.rglob("hub-token"))
    (tmp_path / "all" / "hub-token").write_text("hf_token\n")
    hand_out(tmp_path)
    holders = {path.parent.name for path in tmp_path.rglob("hub-token")}
    assert holders == {"all", "gateway", "node"}
    assert listed(tmp_path / "node")["hub-token"] == "hf_token"
    (tmp_path / "all" / "hub-token").unlink()
    hand_out(tmp_path)
    assert not list(tmp_path.rglob("hub-token"))


def test_keys_say_what_they_are_for(tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        hand_out(tmp_path)
    finally:
        os.umask(previous)
    gateway = listed(tmp_path / "gateway")
    assert gateway["admin-key"].startswith("pl-admin-")
    assert gateway["api-key"].startswith("pl-api-")
    assert mode(tmp_path / "gateway" / "admin-key") == 0o440
