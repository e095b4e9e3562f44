"""Text bundles: what is taken from which file, and what is said of a broken one."""

import json

import pytest

from pilotlight.checkpoint.generation import GenerationDefaults
from pilotlight.common.errors import BadCheckpoint
from pilotlight.text import bundle as under_test
from pilotlight.text.bundle import TextBundle, bundle_from_files, decode, encode
from pilotlight.text.testing import byte_level_json

TOKENIZER = byte_level_json().encode()


def make(tokenizer_config=None, **files) -> TextBundle:
    named = {
        name.replace("__", "."): data if isinstance(data, bytes) else json.dumps(data).encode()
        for name, data in files.items()
    }
    if tokenizer_config is not None:
        named["tokenizer_config.json"] = json.dumps(tokenizer_config).encode()
    return bundle_from_files({"tokenizer.json": TOKENIZER, **named})


def test_a_tokenizer_alone_is_enough():
    assert make() == TextBundle(tokenizer_json=TOKENIZER.decode())


def test_everything_has_its_place():
    bundle = make(
        {
            "chat_template": "{{ bos_token }}",
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
            "add_bos_token": True,
        },
        special_tokens_map__json={
            "eos_token": "ignored",
            "pad_token": "<pad>",
            "additional_special_tokens": ["x"],
        },
        generation_config__json={
            "eos_token_id": [1, 3],
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
        },
        config__json={"eos_token_id": 9},
    )
    assert bundle.chat_template == "{{ bos_token }}"
    assert bundle.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert bundle.add_bos_token is True
    assert bundle.generation == GenerationDefaults(
        eos_token_ids=(1, 3), temperature=0.7, top_p=0.8, top_k=20
    )


def test_end_tokens_may_stand_in_the_models_configuration():
    assert make(config__json={"eos_token_id": 9}).generation.eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("config", "template"),
    [
        ({}, None),
        ({"chat_template": None}, None),
        (
            {
                "chat_template": [
                    {"name": "rag", "template": "r"},
                    {"name": "default", "template": "d"},
                ]
            },
            "d",
        ),
        ({"chat_template": [{"name": "rag", "template": "r"}]}, None),
    ],
)
def test_the_template_of_the_configuration(config, template):
    assert make(config).chat_template == template


def test_a_template_file_goes_first():
    assert make({"chat_template": "config"}, chat_template__jinja=b"file").chat_template == "file"


def test_round_trip_and_digest():
    bundle = make({"bos_token": "<s>", "eos_token": "</s>", "chat_template": "x"})
    assert decode(encode(bundle)) == bundle
    turned = make({"chat_template": "x", "eos_token": "</s>", "bos_token": "<s>"})
    assert turned.digest() == bundle.digest()
    assert make().digest() != bundle.digest()


def test_the_digest_is_the_same_in_every_release():
    bundle = TextBundle(
        tokenizer_json="{}",
        chat_template="{{ messages }}",
        special_tokens={"eos_token": "</s>", "bos_token": "<s>"},
    )
    assert bundle.digest() == "45d8f536034968d76b4bc9b37d0d4e8f6963635b0ab9c4918edc4c0481510f67"


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, r"there is no tokenizer\.json"),
        ({"tokenizer.json": b"{}"}, r"tokenizer\.json: "),
        ({"tokenizer.json": b"\xff"}, r"tokenizer\.json: not UTF-8"),
        ({"tokenizer.json": b'{"model":{"type":"BPE"}}'}, r"tokenizer\.json: "),
        ({"tokenizer_config.json": b"[]"}, r"tokenizer_config\.json: not a JSON object"),
        (
            {"tokenizer_config.json": b'{"bos_token":3}'},
            r"tokenizer_config\.json: bos_token is not a string",
        ),
        ({"tokenizer_config.json": b'{"bos_token":{}}'}, r"bos_token\.content is missing"),
        (
            {"tokenizer_config.json": json.dumps({"bos_token": "x" * 300}).encode()},
            "bos_token is longer",
        ),
        ({"tokenizer_config.json": b'{"add_bos_token":"yes"}'}, "add_bos_token"),
        ({"tokenizer_config.json": b'{"chat_template":3}'}, "chat_template is not a string"),
        ({"tokenizer_config.json": b'{"chat_template":["x"]}'}, "chat_template holds more"),
        ({"tokenizer_config.json": b'{"chat_template":"{% for %}"}'}, "chat template is not valid"),
        ({"chat_template.jinja": b"\xff"}, r"chat_template\.jinja: not UTF-8"),
        (
            {"generation_config.json": b'{"eos_token_id":"x"}'},
            r"generation_config\.json: eos_token_id",
        ),
    ],
)
def test_what_is_broken_is_named(files, fault):
    with pytest.raises(BadCheckpoint, match=fault):
        bundle_from_files({"tokenizer.json": TOKENIZER, **files} if files else {})


def test_sizes_are_bounded(monkeypatch):
    monkeypatch.setattr(under_test, "MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(BadCheckpoint, match="at most 100"):
        make()
    monkeypatch.setattr(under_test, "MAX_BUNDLE_BYTES", 10)
    with pytest.raises(BadCheckpoint, match="at most 10"):
        decode(b" " * 11)


def test_what_is_no_bundle_is_refused():
    for data in (b"", b"{}", b"\xff", b'{"tokenizer_json":1}'):
        with pytest.raises(BadCheckpoint, match="not a text bundle"):
            decode(data)
