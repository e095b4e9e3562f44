"""``pilotlight bench``."""

import os
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from pilotlight.cli.options import Json, home_folder
from pilotlight.common.errors import UnprocessableInput

CONCURRENCY, MAX_CONCURRENCY = 8, 4096
MAX_REQUESTS = 1_000_000
AtLeastOne = validators.Number(gte=1)


def bench(
    model: Annotated[str, Parameter(help="A name that `pilotlight model list` shows.")],
    /,
    *,
    num_prompts: Annotated[
        int,
        Parameter(
            name=["--num-prompts", "-n"],
            help="Requests.",
            validator=validators.Number(gte=1, lte=MAX_REQUESTS),
        ),
    ] = 100,
    max_concurrency: Annotated[
        int | None,
        Parameter(
            name=["--max-concurrency", "-c"],
            help="Requests at a time, at most: 8, or with a rate as many as come.",
            validator=validators.Number(gte=1, lte=MAX_CONCURRENCY),
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        Parameter(
            help="Poisson's arrivals a second; without it the next is sent as soon as one has ended.",
            validator=validators.Number(gt=0),
        ),
    ] = None,
    dataset: Annotated[
        Literal["random", "sharegpt"], Parameter(help="Where prompts come from.")
    ] = "random",
    dataset_path: Annotated[
        Path | None, Parameter(help="The file in ShareGPT's form, with --dataset sharegpt.")
    ] = None,
    input_len: Annotated[
        int, Parameter(help="Tokens of a random prompt.", validator=AtLeastOne)
    ] = 128,
    output_len: Annotated[
        int | None,
        Parameter(
            help="Tokens of an answer, at most: 128, or as long as the file's reply is.",
            validator=AtLeastOne,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, Parameter(help="Let answers end earlier with --no-ignore-eos.")
    ] = True,
    temperature: Annotated[float, Parameter(help="0 always takes the likeliest token.")] = 0.0,
    warmup: Annotated[
        bool, Parameter(help="Ask once before, uncounted; with --no-warmup a cold start counts.")
    ] = True,
    timeout_s: Annotated[
        float, Parameter(help="Of one request.", validator=validators.Number(gt=0))
    ] = 600.0,
    seed: Annotated[int, Parameter(help="The same gives the same prompts and arrivals.")] = 0,
    save: Annotated[Path | None, Parameter(help="Write the figures into this file, too.")] = None,
    json: Json = False,
) -> int:
    """Measure what clients see under load: TTFT, TPOT, ITL and whole answers, as percentiles.

    Ends with 1 when requests failed.
    """
    from pilotlight.cli.inference import Access
    from pilotlight.cli.load_run import Plan, run_load
    from pilotlight.cli.system import run_stoppable

    if (dataset == "sharegpt") != (dataset_path is not None):
        raise UnprocessableInput("--dataset sharegpt and --dataset-path FILE go together")
    plan = Plan(
        model=model,
        requests=num_prompts,
        concurrency=max_concurrency or (CONCURRENCY if request_rate is None else MAX_CONCURRENCY),
        rate_per_s=request_rate,
        input_tokens=input_len,
        output_tokens=output_len,
        sharegpt=dataset_path,
        ignore_eos=ignore_eos,
        temperature=temperature,
        timeout_s=timeout_s,
        seed=seed,
        warm=warmup,
    )
    access = Access.from_environment(os.environ, home_folder())
    return run_stoppable(run_load(access, plan, as_json=json, save=save))
