"""A model cut into layer ranges is the same model."""

import pytest
import torch
from families import FAMILIES

from pilotlight.engine.core.batch import Batch, Segment


@pytest.mark.parametrize("kind", [*FAMILIES, "llama-tied"])
def test_any_cut_gives_the_same_tokens(kind, checkpoint, chain, prompts):
    model = checkpoint(kind, 1)
    whole, *cut = (chain(model, num_ranges).greedy(prompts, 64) for num_ranges in (1, 2, 4))
    assert whole == [
        model.would_say(prompt, output) for prompt, output in zip(prompts, whole, strict=True)
    ]
    assert cut == [whole, whole]


def test_each_range_may_keep_its_kv_elsewhere(checkpoint, chain, prompts):
    model, prompt = checkpoint("qwen2", 2), prompts[1]
    first, second = chain(model, 2).runners
    hidden = first.run(Batch((Segment(0, len(prompt), (4, 1), True),)), torch.tensor(prompt))
    assert hidden.shape == (len(prompt), model.spec.hidden_size)
    logits = second.run(Batch((Segment(0, len(prompt), (7, 30), True),)), hidden)
    torch.testing.assert_close(logits, model.logits(prompt)[-1:], rtol=0, atol=1e-10)


def test_a_chunk_that_asks_for_no_logits_gets_none(checkpoint, chain, prompts):
    model = checkpoint("llama")
    logits = chain(model, 1).run(
        [Segment(0, 4, (0,), False), Segment(0, 1, (1,), True)], [1, 2, 3, 4, 5]
    )
    assert logits.shape == (1, model.spec.vocab_size)
    assert chain(model, 4).run([Segment(0, 4, (0,), False)], [1, 2, 3, 4]).shape == (
        0,
        model.spec.vocab_size,
    )
