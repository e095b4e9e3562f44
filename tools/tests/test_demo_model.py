"""The demo model's text and its committed files; neither torch nor transformers is needed."""

import json
import math
import struct
from pathlib import Path
from random import Random
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from demo_model.corpus import all_facts, documents
from demo_model.grammar import Fact
from demo_model.phrasing import ask, ask_held_out, bare_words
from demo_model.stories import plots
from demo_model.tokenizer import encode_documents

FOLDER = Path(__file__).parents[2] / "models" / "ember-7m"
LARGEST_FILES_BYTES = 16 * 1024 * 1024
BF16_BYTES = 2

Shapes = dict[str, tuple[int, ...]]


def read_json(name: str) -> dict[str, object]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def every_fact() -> list[Fact]:
    return [fact for family in all_facts().values() for fact in family]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def stored() -> Shapes:
    """Tensor name -> shape, from the header of the checkpoint."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__")
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    return {name: tuple(entry["shape"]) for name, entry in header.items()}


def expected_shapes(config: dict[str, int]) -> Shapes:
    hidden, feed_forward = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (feed_forward, hidden),
            "mlp.up_proj": (feed_forward, hidden),
            "mlp.down_proj": (hidden, feed_forward),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def test_the_same_seed_gives_the_same_text():
    assert list(documents(3, 200)) == list(documents(3, 200))
    assert list(documents(3, 200)) != list(documents(4, 200))


def test_every_answer_ends_in_punctuation():
    answers = [fact.answer for fact in every_fact()]
    answers += [
        segment.text for document in documents(5, 300) for segment in document if segment.learned
    ]
    assert [answer for answer in answers if answer[-1] not in '.!?"'] == []


def test_no_question_has_two_answers():
    answers: dict[str, str] = {}
    for fact in every_fact():
        for form in fact.forms:
            assert answers.setdefault(form.lower().rstrip("?.!"), fact.answer) == fact.answer


def test_no_template_is_left_unfilled():
    texts = [segment.text for document in documents(6, 500) for segment in document]
    assert [text for text in texts if "{" in text or "}" in text] == []


def test_training_never_asks_what_is_held_out():
    rng = Random(1)
    for fact in every_fact():
        question = ask_held_out(fact, rng)
        if question is not None:
            assert bare_words(question) not in {bare_words(ask(fact, rng)) for _ in range(5)}


def test_every_plot_has_the_same_number_of_beats():
    assert {len(beats) for beats in plots().values()} == {8}


def test_vocabulary_is_small_and_complete(tokenizer: Tokenizer):
    assert tokenizer.get_vocab_size() <= 4096
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"]
    text = "Any text at all: żółć, 日本, 🔥, <b>.\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_committed_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= LARGEST_FILES_BYTES


def test_weights_agree_with_the_configuration(stored: Shapes):
    assert stored == expected_shapes(read_json("config.json"))
    parameters = sum(math.prod(shape) for shape in stored.values())
    assert 6_000_000 <= parameters <= 8_000_000
    assert (FOLDER / "model.safetensors").stat().st_size >= parameters * BF16_BYTES


def test_special_tokens_agree_everywhere(tokenizer: Tokenizer):
    config, settings = read_json("config.json"), read_json("tokenizer_config.json")
    generation = read_json("generation_config.json")
    for kind in ("bos", "eos", "pad"):
        token_id = tokenizer.token_to_id(str(settings[f"{kind}_token"]))
        assert token_id == config[f"{kind}_token_id"] == generation[f"{kind}_token_id"]
    assert tokenizer.encode("Hello").ids[0] == config["bos_token_id"]


def render(
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: list[dict[str, Any]] | None = None,
) -> str:
    settings = read_json("tokenizer_config.json")
    environment = ImmutableSandboxedEnvironment()
    # Jinja's own filter escapes HTML; who renders chat templates replaces it.
    environment.filters["tojson"] = json.dumps
    template = environment.from_string(str(settings["chat_template"]))
    return template.render(
        messages=messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        bos_token=settings["bos_token"],
    )


def test_chat_template():
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello! "},
        {"role": "assistant", "content": "Hello! How can I help you?"},
        {"role": "tool", "content": "42"},
    ]
    assert render(messages, add_generation_prompt=True) == (
        "<|bos|><|system|>Be kind.<|end|><|user|>Hello!<|end|>"
        "<|assistant|>Hello! How can I help you?<|end|><|user|>42<|end|><|assistant|>"
    )


def test_chat_template_with_tools():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "42"},
    ]
    written = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert render(messages, tools=[{"name": "f"}], add_generation_prompt=False) == (
        '<|bos|><|system|>Tools: [{"name": "f"}] A call: <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|end|>'
        f"<|user|>Hello!<|end|><|assistant|>{written}\n{written}<|end|><|user|>42<|end|>"
    )


def test_training_encodes_chats_as_the_template_does(tokenizer: Tokenizer):
    chats = [document for document in documents(8, 50) if document[0].role != "text"]
    for document, encoded in zip(chats, encode_documents(tokenizer, chats), strict=True):
        messages = [{"role": segment.role, "content": segment.text} for segment in document]
        text = render(messages, add_generation_prompt=False)
        assert encoded.ids == tokenizer.encode(text, add_special_tokens=False).ids
