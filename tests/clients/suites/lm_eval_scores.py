"""lm-eval's own class for servers of completions: scores the pairs of a file, and writes what it
says of them.
"""

import json
import os
import sys
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI


def main(asked: Path, told: Path, tokenizer: str) -> None:
    model = LocalCompletionsAPI(
        base_url=f"{os.environ['PILOTLIGHT_URL']}/v1/completions",
        model="ember-7m",
        tokenizer=tokenizer,
        tokenizer_backend="huggingface",
        max_length=1024,
        batch_size=4,
    )
    pairs = json.loads(asked.read_text())
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=tuple(pair), idx=number)
        for number, pair in enumerate(pairs)
    ]
    scored = model.loglikelihood(requests)
    told.write_text(json.dumps([[float(sum_), bool(greedy)] for sum_, greedy in scored]))


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
