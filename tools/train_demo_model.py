"""Train, export and evaluate the demo model: `python tools/train_demo_model.py
{train,evaluate}`.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import torch

from demo_model.export import export_model
from demo_model.model import ModelShape
from demo_model.tokenizer import train_tokenizer
from demo_model.training import Progress, TrainingPlan, build_rows, train

_DEFAULT_FOLDER = Path(__file__).parents[1] / "models" / "ember-7m"


def _arguments() -> argparse.Namespace:
    plan = TrainingPlan()
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser(
        "train", help="make the text, train, and write the model's files"
    )
    training.add_argument("--steps", type=int, default=plan.steps)
    training.add_argument("--rows-per-step", type=int, default=plan.rows_per_step)
    training.add_argument(
        "--documents", type=int, default=plan.documents, help="size of the corpus, in whole shards"
    )
    training.add_argument("--peak-rate", type=float, default=plan.peak_rate)
    training.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="to make the corpus with"
    )
    evaluation = commands.add_parser(
        "evaluate", help="ask the exported model every fact (needs transformers)"
    )
    evaluation.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    evaluation.add_argument(
        "--report", type=Path, help="where to write the whole report, mistakes included"
    )
    for command, seed in ((training, plan.seed), (evaluation, 1)):
        command.add_argument("--folder", type=Path, default=_DEFAULT_FOLDER)
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--seed", type=int, default=seed)
    return parser.parse_args()


def _train(arguments: argparse.Namespace) -> None:
    plan = replace(
        TrainingPlan(),
        seed=arguments.seed,
        steps=arguments.steps,
        rows_per_step=arguments.rows_per_step,
        documents=arguments.documents,
        peak_rate=arguments.peak_rate,
    )
    tokenizer = train_tokenizer(plan.seed)
    rows = build_rows(tokenizer, plan, arguments.processes)
    shape = ModelShape(vocabulary=tokenizer.get_vocab_size())
    print(
        f"vocabulary {shape.vocabulary}, {len(rows)} rows of {shape.context_tokens} tokens",
        flush=True,
    )
    model = train(rows, shape, plan, torch.device(arguments.device), _print_progress)
    export_model(model, tokenizer, arguments.folder)
    print(f"{sum(p.numel() for p in model.parameters())} parameters written to {arguments.folder}")


def _print_progress(progress: Progress) -> None:
    print(f"step {progress.step}  loss {progress.loss:.4f}", flush=True)


def _evaluate(arguments: argparse.Namespace) -> None:
    # Imported here, because training does not need transformers.
    from demo_model.evaluate import evaluate, write_report

    dtype = getattr(torch, arguments.dtype)
    report = evaluate(arguments.folder, arguments.seed, torch.device(arguments.device), dtype)
    if arguments.report is not None:
        write_report(report, arguments.report)
    print(
        json.dumps(
            {key: value for key, value in report.items() if key != "mistakes"},
            indent=2,
            ensure_ascii=False,
        )
    )


if __name__ == "__main__":
    chosen = _arguments()
    {"train": _train, "evaluate": _evaluate}[chosen.command](chosen)
