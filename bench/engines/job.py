"""What ``bench/engine_cpu.py`` asks of an engine.

The standard library alone: an engine may bring its own interpreter.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Read from the command line."""

    folder: str
    dtype: str
    batches: list[int]
    prompt_tokens: int
    output_tokens: int
    repeats: int
    threads: int
    vocab_size: int

    def prompts(self, batch: int, run: int) -> list[list[int]]:
        """Prompts that have nothing in common, nor with those of another run: no prefix cache
        helps.
        """
        return [
            [
                (1 + 37 * row + 1009 * run + 101 * place) % self.vocab_size
                for place in range(self.prompt_tokens)
            ]
            for row in range(batch)
        ]


def read() -> Job:
    """The job of this process."""
    return Job(**json.loads(sys.argv[1]))


def measure(job: Job, version: str, generate: Callable[[list[list[int]]], list[list[int]]]) -> None:
    """Runs and prints; ``generate`` gives the output ids of each prompt.

    Raises:
        SystemExit: it gave another number of tokens than it was asked for.
    """
    seconds: dict[int, list[float]] = {}
    output_ids: list[int] = []
    for batch in job.batches:
        for number in range(job.repeats + 1):
            prompts = job.prompts(batch, number)
            began_s = time.monotonic()
            outputs = generate(prompts)
            took_s = time.monotonic() - began_s
            if [len(each) for each in outputs] != [job.output_tokens] * batch:
                raise SystemExit(
                    f"asked for {batch} times {job.output_tokens} tokens, got {[len(each) for each in outputs]}"
                )
            if number:
                seconds.setdefault(batch, []).append(took_s)
        output_ids = outputs[0] if batch == job.batches[0] else output_ids
    print(json.dumps({"version": version, "seconds": seconds, "output_ids": output_ids}))
