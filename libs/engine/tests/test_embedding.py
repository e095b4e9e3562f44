"""Rows of the table that token ids name, and who takes them."""

import pytest
import torch
from random_models import KINDS, spec_of
from torch import Tensor

from pilotlight.engine.models.decoder import EMBEDDING
from pilotlight.engine.models.registry import decoder_of
from pilotlight.policy.model import Dtype


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_may_take_rows_in_its_own_way(kind: str) -> None:
    spec = spec_of(kind, Dtype.BFLOAT16)
    decoder = decoder_of(spec)
    table = torch.randn(spec.vocab_size, spec.hidden_size).bfloat16()
    token_ids = torch.tensor([0, spec.vocab_size - 1, 5, 5], dtype=torch.int32)
    asked: list[Tensor] = []

    def rows_at(places: Tensor, rows: Tensor) -> Tensor:
        asked.append(places)
        return rows[places.long()]

    taken = decoder.embed({EMBEDDING: table}, token_ids, rows_at)
    assert asked == [token_ids]
    assert torch.equal(taken, decoder.embed({EMBEDDING: table}, token_ids))
