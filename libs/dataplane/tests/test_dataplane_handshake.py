"""How two nodes of a cluster prove their key to each other; without sockets."""

from typing import Any

import pytest
from blake3 import blake3
from linked_nodes import KEY

from pilotlight.common.cluster_key import ClusterKey, find_cluster_key
from pilotlight.common.errors import PeerRefused, SettingsInvalid
from pilotlight.common.handshake import LINK_PURPOSE, Identity, Initiator, Responder
from pilotlight.common.messages.link import LINK_VERSION, Hello, Proof, Welcome
from pilotlight.policy.ids import NodeId

A, B = NodeId("initiator"), NodeId("responder")
OTHER_KEY = ClusterKey(b"the key of another cluster", LINK_PURPOSE)


def sides(key: ClusterKey = KEY, expected: NodeId = B) -> tuple[Initiator, Responder]:
    return Initiator(Identity(A, KEY), expected), Responder(Identity(B, key))


def test_two_nodes_of_one_cluster_know_each_other() -> None:
    initiator, responder = sides()
    proof = initiator.on_welcome(responder.on_hello(initiator.hello()))
    initiator.on_end(responder.on_proof(proof))
    assert responder.peer == A


def test_the_proof_is_the_keyed_hash_that_the_page_says() -> None:
    """Recomputed from the words of docs/decisions/0014."""
    initiator, responder = sides()
    welcome = responder.on_hello(initiator.hello())
    key = blake3(
        b"the key of this cluster", derive_key_context="pilotlight cluster key 2026: link"
    ).digest()
    fields = [
        b"gives",
        LINK_VERSION.to_bytes(4, "big"),
        A.encode(),
        initiator.nonce,
        B.encode(),
        responder.nonce,
    ]
    told = b"".join(len(field).to_bytes(4, "big") + field for field in fields)
    assert welcome.proof == blake3(told, key=key).digest()


def test_the_initiator_refuses_another_key_and_another_node() -> None:
    initiator, responder = sides(OTHER_KEY)
    with pytest.raises(PeerRefused, match="another cluster key"):
        initiator.on_welcome(responder.on_hello(initiator.hello()))
    initiator, responder = sides(expected=NodeId("another"))
    with pytest.raises(PeerRefused, match="responder answers where another should"):
        initiator.on_welcome(responder.on_hello(initiator.hello()))


@pytest.mark.parametrize("proof", [b"", bytes(32), OTHER_KEY.proof(b"asks")])
def test_the_responder_refuses_a_node_without_the_key(proof: bytes) -> None:
    initiator, responder = sides()
    responder.on_hello(initiator.hello())
    with pytest.raises(PeerRefused, match="another cluster key"):
        responder.on_proof(Proof(proof=proof))


def test_a_proof_is_good_once_and_for_its_side_only() -> None:
    initiator, responder = sides()
    welcome = responder.on_hello(initiator.hello())
    proof = initiator.on_welcome(welcome)
    with pytest.raises(PeerRefused):
        # Sent back to the side that made it.
        responder.on_proof(Proof(proof=welcome.proof))
    again = Responder(responder.me)
    again.on_hello(initiator.hello())
    with pytest.raises(PeerRefused):
        # Recorded, and played again.
        again.on_proof(proof)
    with pytest.raises(PeerRefused):
        Responder(responder.me).on_proof(proof)


def test_another_version_and_a_short_nonce_are_refused_on_both_sides() -> None:
    initiator, responder = sides()
    hello = initiator.hello()
    for wrong in (
        Hello(version=LINK_VERSION + 1, node_id=A, nonce=hello.nonce),
        Hello(version=LINK_VERSION, node_id=A, nonce=b"x"),
    ):
        with pytest.raises(PeerRefused):
            responder.on_hello(wrong)
    welcome = responder.on_hello(hello)
    for wrong in (
        Welcome(version=0, node_id=B, nonce=welcome.nonce, proof=welcome.proof),
        Welcome(version=LINK_VERSION, node_id=B, nonce=b"", proof=welcome.proof),
    ):
        with pytest.raises(PeerRefused):
            initiator.on_welcome(wrong)


def test_the_key_is_found_in_its_file_and_a_short_one_is_refused(tmp_path: Any) -> None:
    assert find_cluster_key(None, LINK_PURPOSE) is None
    assert find_cluster_key(tmp_path, LINK_PURPOSE) is None
    (tmp_path / "cluster-key").write_text("the key of this cluster\n")
    found = find_cluster_key(tmp_path, LINK_PURPOSE)
    assert found is not None
    assert found.proof(b"x") == KEY.proof(b"x")
    assert found.proof(b"x") != ClusterKey(b"the key of this cluster", "artifacts").proof(b"x")
    assert "cluster" not in repr(found)
    (tmp_path / "cluster-key").write_text("short")
    with pytest.raises(SettingsInvalid, match="16"):
        find_cluster_key(tmp_path, LINK_PURPOSE)
