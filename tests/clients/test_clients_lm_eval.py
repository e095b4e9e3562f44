"""lm-eval's loglikelihood through ``/v1/completions``: what transformers computes of the same
checkpoint.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_suites import SUITES, run, told
from embedded_system import DEMO_FOLDER, RunningSystem, running

pytestmark = [pytest.mark.clients, pytest.mark.slow]

ROUNDING = 0.2
"""Of a token: the demo model runs in bfloat16. In float32 the engine's own tests compare."""
CONTEXTS = ("A pilot light is", "What is a pilot light?", "The quick brown", "Water boils")
ENDS = (" a small flame that stays on.", " fox jumps over the dog.", " at once")
GREEDY_TOKENS = 6


class Reference:
    """The demo model by transformers, in float32."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch: Any = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_FOLDER)

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def scores(self, token_ids: list[int]) -> Any:
        """Log probabilities at each place."""
        with self._torch.inference_mode():
            rows = self._torch.tensor([token_ids])
            return self._model(input_ids=rows).logits[0].log_softmax(dim=-1)

    def likeliest(self, text: str) -> str:
        """How the model goes on."""
        ids = self.ids(text)
        for _ in range(GREEDY_TOKENS):
            ids.append(int(self.scores(ids)[-1].argmax()))
        return self._tokenizer.decode(ids)[len(text) :]

    def sum_of(self, context: str, end: str) -> tuple[float, int]:
        """Of the tokens of an end, and how many they are."""
        ids, start = self.ids(context + end), len(self.ids(context))
        scores = self.scores(ids)
        return sum(float(scores[at - 1, ids[at]]) for at in range(start, len(ids))), len(
            ids
        ) - start


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-clients-") as folder:
        os.chmod(folder, 0o711)
        with running(Path(folder) / "home", "--with-demo-model") as made:
            yield made


def test_loglikelihoods_are_those_of_transformers(system: RunningSystem, tmp_path: Path) -> None:
    reference = Reference()
    greedy = [(context, reference.likeliest(context)) for context in CONTEXTS[:2]]
    pairs = [*greedy, *((context, end) for context in CONTEXTS for end in ENDS)]
    asked, scored = tmp_path / "asked.json", tmp_path / "told.json"
    asked.write_text(json.dumps(pairs))
    shutil.copy(SUITES / "lm_eval_scores.py", tmp_path)
    python = Path(os.environ["PILOTLIGHT_CLIENTS_FOLDER"]) / "others" / "bin" / "python"
    run(
        [str(python), "lm_eval_scores.py", str(asked), str(scored), str(DEMO_FOLDER)],
        tmp_path,
        told(system, OPENAI_API_KEY=system.key("api"), HF_HUB_OFFLINE="1"),
    )
    results = json.loads(scored.read_text())
    assert len(results) == len(pairs)
    for (context, end), (sum_, _) in zip(pairs, results, strict=True):
        wanted, tokens = reference.sum_of(context, end)
        assert sum_ == pytest.approx(wanted, abs=ROUNDING * tokens), (context, end)
    says = [greedy_ for _, greedy_ in results]
    assert all(says[: len(greedy)]), "the likeliest tokens are said to be so"
    assert not all(says[len(greedy) :])
