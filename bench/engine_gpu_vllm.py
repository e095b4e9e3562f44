"""vLLM on a GPU, in one process, for ``bench/engine_gpu.py``. Its interpreter brings ``vllm``.

Default settings, but for what makes the two comparable: no prefix caching, as much KV as the other
engine has (then vLLM's share of the device's memory, which it would fill with KV, says nothing but
what has to be free).
"""

import os
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
# Its first choice for fp8 in blocks on Hopper, DeepGEMM, compiles each variant when it is first
# used: three minutes ahead of the first step, or as much within captures and turns. Without it vLLM
# takes kernels that were compiled before (CUTLASS, else Triton's). Whoever has the time sets 1.
os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")

import engine_gpu_job as job
import numpy as np
from engine_gpu_logits import FORCED_BIAS, FORCED_TOKEN

FREE_SHARE = 0.5
"""Of the device's memory; vLLM does not start where less is free."""


def main() -> None:
    """Answers until its input ends."""
    answers, asked = job.take_stdout(), job.read()
    import vllm

    engine = vllm.LLM(
        asked.folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=asked.kv_bytes,
        gpu_memory_utilization=FREE_SHARE,
        max_logprobs=-1,
    )

    def generate(
        prompts: list[list[int]], wanted: list[int], _: int | None = None
    ) -> list[list[int]]:
        sampling = [
            vllm.SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
            )
            for count in wanted
        ]
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
        )
        return [list(each.outputs[0].token_ids) for each in outputs]

    def likeliest(ask: dict[str, Any]) -> dict[str, Any]:
        sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=ask["output_tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=job.TOP,
        )
        prompts = [
            {"prompt_token_ids": prompt}
            for prompt in job.prompts_of(ask["seed"], ask["prompt_tokens"])
        ]
        outputs = [each.outputs[0] for each in engine.generate(prompts, sampling, use_tqdm=False)]
        tops = [
            [[[token, at.logprob] for token, at in place.items()] for place in each.logprobs]
            for each in outputs
        ]
        best_first = [
            [sorted(place, key=lambda top: -top[1])[: job.TOP] for place in each] for each in tops
        ]
        return {"outputs": [list(each.token_ids) for each in outputs], "tops": best_first}

    def logits(ask: dict[str, Any]) -> dict[str, Any]:
        # Told are logarithms of probabilities before anything is done to the logits.
        sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=ask["places"],
            ignore_eos=True,
            detokenize=False,
            logprobs=job.VOCAB_SIZE,
            flat_logprobs=True,
            logit_bias={FORCED_TOKEN: FORCED_BIAS},
        )
        prompts = [
            {"prompt_token_ids": prompt}
            for prompt in job.prompts_of(ask["seed"], ask["prompt_tokens"])
        ]
        found = np.full((len(prompts), ask["places"], job.VOCAB_SIZE), np.nan, np.float32)
        for row, each in enumerate(engine.generate(prompts, sampling, use_tqdm=False)):
            told = each.outputs[0].logprobs
            for place, (start, end) in enumerate(
                zip(told.start_indices, told.end_indices, strict=True)
            ):
                found[row, place, told.token_ids[start:end]] = told.logprobs[start:end]
        file = os.path.join(asked.folder, "logits-vllm.npy")
        np.save(file, found)
        return {"file": file}

    about = {
        "version": f"vLLM {vllm.__version__}",
        "deep_gemm": os.environ["VLLM_USE_DEEP_GEMM"] != "0",
    }
    job.serve(answers, about, generate, {"likeliest": likeliest, "logits": logits})


if __name__ == "__main__":
    main()  # vLLM starts processes that import this file again
