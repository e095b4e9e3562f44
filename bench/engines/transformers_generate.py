"""transformers' ``generate``."""

import job
import torch
import transformers

JOB = job.read()
torch.set_num_threads(JOB.threads)
MODEL = transformers.AutoModelForCausalLM.from_pretrained(
    JOB.folder, dtype=getattr(torch, JOB.dtype)
).eval()


@torch.inference_mode()
def generate(prompts: list[list[int]]) -> list[list[int]]:
    """All prompts have one length, so nothing is padded."""
    ids = torch.tensor(prompts)
    outputs = MODEL.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=JOB.output_tokens,
        max_new_tokens=JOB.output_tokens,
        pad_token_id=0,
    )
    return outputs[:, JOB.prompt_tokens :].tolist()


job.measure(JOB, f"transformers {transformers.__version__}, torch {torch.__version__}", generate)
