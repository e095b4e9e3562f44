"""How long vLLM takes to be ready, for ``bench/medusa.py``: a line of JSON. Its interpreter brings
``vllm``.

``python medusa_vllm.py FOLDER SIZES [--eager]``: FOLDER has ``config.json``, SIZES are the batch
sizes to capture, separated by commas. All of it runs in this process. vLLM is imported and the
device has its context when the clock starts. The weights are made on the device
(``load_format="dummy"``): reading files is not counted.
"""

import json
import logging
import os
import re
import sys
import time
from typing import Any

os.environ |= {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

TOOK = re.compile(r"(?:took|takes|finished in|and) ([\d.]+) (?:s|secs?|seconds)\b")
"""What a line of vLLM's log says of a stage's time."""
STAGES = (
    ("initialise", "init engine"),
    ("weights", "loading"),
    ("compile", "compil"),
    ("capture", "captur"),
)
"""Names of stages, by what of a line tells them; the first that fits. ``initialise`` has compiling
and capturing in it."""


class Stages(logging.Handler):
    """Keeps what the log says of times."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """One line; of several of a stage the longest stands."""
        for stage, seconds in stages_of(record.getMessage()).items():
            self.told[stage] = max(seconds, self.told.get(stage, 0.0))


def stages_of(line: str) -> dict[str, float]:
    """What a line says of a stage's seconds."""
    found = TOOK.search(line)
    name = next((name for name, word in STAGES if word in line.lower()), None)
    return {f"{name}_s": float(found[1])} if found and name is not None else {}


def main() -> None:
    """Starts one engine."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, sizes = sys.argv[1], [int(one) for one in sys.argv[2].split(",")]
    eager = "--eager" in sys.argv[3:]
    import torch
    import vllm

    stages = Stages()
    logging.getLogger("vllm").addHandler(stages)
    torch.zeros(1, device="cuda")
    settings: dict[str, Any] = (
        {"enforce_eager": True}
        if eager
        else {"compilation_config": {"cudagraph_capture_sizes": sizes}}
    )
    began_s = time.perf_counter()
    engine = vllm.LLM(
        folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, **settings
    )
    total_s = time.perf_counter() - began_s
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
    told = {
        **stages.told,
        "total_s": total_s,
        "tokens": len(outputs[0].outputs[0].token_ids),
        "version": vllm.__version__,
    }
    print(json.dumps(told), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()  # vLLM may start processes that import this file again
