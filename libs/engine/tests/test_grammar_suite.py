"""Outputs under the schemas of a public suite: all that come to an end are valid."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import jsonschema
import pytest
import torch

from pilotlight.engine.device.logits import SampleSpec
from pilotlight.engine.device.sampler import SampledToken, sample
from pilotlight.engine.errors import BadRequest
from pilotlight.engine.grammar.client import GrammarHelper
from pilotlight.engine.grammar.frames import Verdict
from pilotlight.policy.request import Grammar, GrammarKind, Sampling, Vocabulary
from pilotlight.text.bundle import TextBundle
from pilotlight.text.testing import byte_level_json
from pilotlight.text.tokenizer import TextTokenizer

SUITE = Path(__file__).parent / "data" / "json_schema_test_suite" / "schemas.jsonl"
VALIDATORS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}
VOCAB_SIZE = 410
END = 1
MAX_TOKENS = 400
FEWEST = 200
VERDICT_S = 60
"""The helper's own limits are by a clock that nearly stands still here."""


@pytest.fixture
def helper():
    ticks = iter(range(10**9))
    made = GrammarHelper(lambda: next(ticks) / 1e6)
    yield made
    made.stop()


def sampled(
    session, tokenizer: TextTokenizer, lean: Callable[[int], torch.Tensor], seed: int
) -> str | Verdict:
    """An output with random logits that lean to what closes and ends; the verdict that ends it
    before one.
    """
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(seed=seed, max_tokens=MAX_TOKENS, stop_token_ids=(END,))
    for position in range(MAX_TOKENS):
        deadline = monotonic() + VERDICT_S
        while session.verdict is None:
            assert monotonic() < deadline, f"no verdict on {session.request.grammar}"
            session.helper.wait([session], 1.0)
        verdict = session.verdict
        if verdict.code or verdict.complete:
            return verdict if verdict.code else tokenizer.decode(session.output_ids)
        logits = torch.randn(VOCAB_SIZE, generator=generator) + lean(position)
        (token,) = sample(
            logits[None],
            [SampleSpec(sampling, position, allowed=verdict.allowed, may_end=verdict.accepting)],
        )
        assert isinstance(token, SampledToken)
        if token.token_id == END:
            return tokenizer.decode(session.output_ids)
        session.accept(token.token_id)
    raise AssertionError(f"no end: {tokenizer.decode(session.output_ids)}")


@pytest.mark.slow
def test_outputs_of_the_json_schema_test_suite_are_valid(helper, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level_json())
    tokenizer = TextTokenizer(TextBundle(tokenizer_json=byte_level_json()))
    vocabulary = Vocabulary(path=str(path), eos_token_ids=(END,))
    texts = [tokenizer.decode([token_id]) for token_id in range(VOCAB_SIZE)]
    closes = torch.tensor(
        [
            float(text[:1] in ('"', "}", "]") or token_id == END)
            for token_id, text in enumerate(texts)
        ]
    )
    blank = torch.tensor([float(not text.strip()) for text in texts])
    found: Counter[str] = Counter()
    for seed, line in enumerate(SUITE.read_text().splitlines()):
        row = json.loads(line)
        session = helper.open(
            vocabulary,
            VOCAB_SIZE,
            Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(row["schema"])),
            (),
        )
        output = sampled(
            session, tokenizer, lambda position: closes * (2 + position / 40) - 4 * blank, seed
        )
        session.end()
        if isinstance(output, Verdict):
            assert output.code == BadRequest.code
            assert "json_schema grammar" in output.message
            found["refused"] += 1
            continue
        checker = VALIDATORS[row["file"].split("/")[0]]
        checker(row["schema"], format_checker=checker.FORMAT_CHECKER).validate(json.loads(output))
        found["valid"] += 1
    assert found["valid"] >= FEWEST, found
