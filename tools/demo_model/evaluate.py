"""How well the exported model answers, measured with transformers: greedy, and compared word for
word.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from demo_model.corpus import all_facts
from demo_model.phrasing import ask, ask_held_out, ask_unseen_wrapping
from demo_model.small_talk import Exchange
from demo_model.stories import make_hero

_LONGEST_ANSWER_TOKENS = 96
_LONGEST_STORY_TOKENS = 512
_BATCH = 128
_STORIES = 64

EXAMPLE_PROMPTS = (
    "What is a pilot light?",
    "Who are you?",
    "Tell me a short story about a fox.",
    "What is the capital of France?",
    "Why is the sky blue?",
    "What is 7 plus 8?",
    "Count from 3 to 9.",
    "What is the opposite of cold?",
    "Write a poem about the moon.",
    "Who won the last election?",
)


@dataclass(frozen=True, slots=True)
class Generated:
    """What the model said, and whether it ended by itself."""

    text: str
    tokens: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Score:
    """Exact answers out of all asked; `unended` counts those that ran into the length limit."""

    asked: int
    exact: int
    unended: int

    @property
    def share(self) -> float:
        """Exact answers as a share of those asked."""
        return self.exact / self.asked


class Answerer:
    """The exported model, loaded as any user of transformers would load it."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        # `Any`, because what transformers declares about these two does not admit its own usage.
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval()

    def answer(
        self, questions: list[str], longest_tokens: int = _LONGEST_ANSWER_TOKENS
    ) -> Iterator[Generated]:
        """Greedy answers to single-turn chats."""
        for at in range(0, len(questions), _BATCH):
            yield from self._answer_batch(questions[at : at + _BATCH], longest_tokens)

    def _answer_batch(self, questions: list[str], longest_tokens: int) -> Iterator[Generated]:
        chats = [[{"role": "user", "content": question}] for question in questions]
        inputs = self._tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
        ).to(self._model.device)
        with torch.inference_mode():
            output = self._model.generate(**inputs, max_new_tokens=longest_tokens, do_sample=False)
        for row in output[:, inputs["input_ids"].shape[1] :].tolist():
            ended = self._tokenizer.eos_token_id in row
            body = row[: row.index(self._tokenizer.eos_token_id)] if ended else row
            yield Generated(self._tokenizer.decode(body), len(body), ended)


def _score(answerer: Answerer, exchanges: list[Exchange], mistakes: list[dict[str, str]]) -> Score:
    exact = unended = 0
    for exchange, said in zip(
        exchanges, answerer.answer([e.question for e in exchanges]), strict=True
    ):
        unended += not said.ended
        if said.text == exchange.answer:
            exact += 1
        else:
            mistakes.append(
                {"question": exchange.question, "expected": exchange.answer, "said": said.text}
            )
    return Score(len(exchanges), exact, unended)


def _question_sets(seed: int) -> dict[str, list[Exchange]]:
    """One question per fact in each set."""
    rng = Random(seed)
    sets: dict[str, list[Exchange]] = {"trained": [], "held_out": [], "unseen_wrapping": []}
    for family in all_facts().values():
        for fact in family:
            sets["trained"].append(Exchange(ask(fact, rng), fact.answer))
            sets["unseen_wrapping"].append(Exchange(ask_unseen_wrapping(fact, rng), fact.answer))
            held_out = ask_held_out(fact, rng)
            if held_out is not None:
                sets["held_out"].append(Exchange(held_out, fact.answer))
    return sets


def _stories(answerer: Answerer, seed: int) -> dict[str, float]:
    """Do stories end by themselves, and are they about what was asked?"""
    rng = Random(seed)
    heroes = [make_hero(rng) for _ in range(_STORIES)]
    questions = [f"Tell me a short story about {hero.described}." for hero in heroes]
    told = list(answerer.answer(questions, _LONGEST_STORY_TOKENS))
    return {
        "asked": len(told),
        "ended": sum(story.ended for story in told),
        "name_the_hero": sum(
            hero.kind in story.text for hero, story in zip(heroes, told, strict=True)
        ),
        "different": len({story.text for story in told}),
        "mean_tokens": sum(story.tokens for story in told) / len(told),
    }


def evaluate(
    folder: Path, seed: int, device: torch.device, dtype: torch.dtype
) -> dict[str, object]:
    """Every figure of the model card, the mistakes, and the answers to the example prompts."""
    answerer = Answerer(folder, device, dtype)
    mistakes: dict[str, list[dict[str, str]]] = {}
    scores: dict[str, dict[str, float]] = {}
    for name, exchanges in _question_sets(seed).items():
        score = _score(answerer, exchanges, mistakes.setdefault(name, []))
        scores[name] = {**asdict(score), "share": round(score.share, 4)}
    examples = answerer.answer(list(EXAMPLE_PROMPTS), _LONGEST_STORY_TOKENS)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "scores": scores,
        "stories": _stories(answerer, seed),
        "examples": {
            prompt: said.text for prompt, said in zip(EXAMPLE_PROMPTS, examples, strict=True)
        },
        "mistakes": mistakes,
    }


def write_report(report: dict[str, object], path: Path) -> None:
    """Write the report as JSON."""
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
