"""What is told of prompts, and batches, on a whole system: against transformers, and to the end."""

import json
from typing import Any

import httpx2
import pytest
from embedded_system import DEMO_FOLDER, RunningSystem, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROUNDING = 0.2
"""The demo model runs in bfloat16; in float32 the engine's own tests compare."""
TEXTS = ("A pilot light is a small gas flame that is kept burning.", "The quick brown fox")
"""The model would stop behind the first."""


def reference_logprobs(token_ids: list[int]) -> Any:
    """What transformers says of each place of a row of tokens, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)


def test_loglikelihoods_are_those_of_transformers(system: RunningSystem) -> None:
    """The request that lm-eval's local-completions sends: rows of token ids, echo, one token."""
    bearer = {"Authorization": f"Bearer {system.key('api')}"}
    rows: list[list[int]] = []
    for text in TEXTS:
        asked = {"model": "ember-7m", "prompt": text}
        told = httpx2.post(f"{system.url}/tokenize", json=asked, headers=bearer, timeout=60)
        rows.append(told.json()["tokens"])
    with system.openai() as client:
        answer = client.completions.create(
            model="ember-7m",
            prompt=rows,
            temperature=0,
            max_tokens=1,
            logprobs=1,
            seed=1234,
            echo=True,
        )
    for choice, row in zip(answer.choices, rows, strict=True):
        assert choice.logprobs is not None
        scores: Any = choice.logprobs.token_logprobs
        expected = reference_logprobs(row)
        assert scores[0] is None
        assert len(scores) == len(row) + 1, "lm-eval leaves the last one out"
        wanted = [float(expected[place, token]) for place, token in enumerate(row[1:])]
        assert scores[1 : len(row)] == pytest.approx(wanted, abs=ROUNDING)
        best: Any = choice.logprobs.top_logprobs
        assert all(
            max(place.values()) >= one for place, one in zip(best[1:], scores[1:], strict=True)
        )


def test_the_second_of_two_equal_prompts_is_cached(system: RunningSystem) -> None:
    prompt = " ".join(TEXTS) * 4
    with system.openai() as client:
        usages = [
            client.completions.create(model="ember-7m", prompt=prompt, max_tokens=1).usage
            for _ in range(2)
        ]
    cached = [
        usage.prompt_tokens_details.cached_tokens
        for usage in usages
        if usage is not None and usage.prompt_tokens_details is not None
    ]
    assert cached[0] == 0
    assert cached[1] is not None
    assert cached[1] > 16


def test_a_batch_runs_to_its_end(system: RunningSystem) -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "ember-7m", "prompt": text, "max_tokens": 4, "temperature": 0},
        }
        for number, text in enumerate(TEXTS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with system.openai() as client:
        file = client.files.create(file=("lines.jsonl", content), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        assert ended.output_file_id is not None
        results = client.files.content(ended.output_file_id).text.splitlines()
        alone = [
            client.completions.create(
                model="ember-7m", prompt=text, max_tokens=4, temperature=0
            ).choices[0]
            for text in TEXTS
        ]
    told = [json.loads(result) for result in results]
    assert [one["custom_id"] for one in told] == ["line-0", "line-1"]
    texts = [one["response"]["body"]["choices"][0]["text"] for one in told]
    assert texts == [choice.text for choice in alone]
