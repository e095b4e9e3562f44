"""The text bundle: everything a gateway needs to turn chats into tokens and tokens into text, in
one content-addressed object.

Registration makes it once from a checkpoint's files; every gateway that serves the model loads it
by its digest.
"""

from collections.abc import Mapping
from typing import Any, cast

import msgspec
import tokenizers
from blake3 import blake3

from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.generation import GENERATION_FILE, GenerationDefaults, parse_generation
from pilotlight.checkpoint.strict_json import MAX_CONFIG_BYTES, JsonObject
from pilotlight.common.errors import BadCheckpoint
from pilotlight.policy.ids import Digest
from pilotlight.text.decoding import is_panic
from pilotlight.text.template import MAX_TEMPLATE_CHARS, check_template

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "config.json"

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
"""Largest ``tokenizer.json``: twice that of a vocabulary of 262,144 tokens."""
MAX_BUNDLE_BYTES = 2 * MAX_TOKENIZER_BYTES + MAX_CONFIG_BYTES
MAX_SPECIAL_TOKEN_CHARS = 256

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TextBundle(msgspec.Struct, frozen=True, kw_only=True):
    """A model's text files, reduced to what is used."""

    tokenizer_json: str
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    """By role (``bos_token``, ``eos_token``, ...): what chat templates may refer to."""
    add_bos_token: bool | None = None
    """Whether plain prompts begin with ``bos_token``; None leaves it to ``tokenizer.json``."""
    generation: GenerationDefaults = GenerationDefaults()

    def digest(self) -> Digest:
        """What ``Model.text_digest`` is: BLAKE3 over the encoding."""
        return digest_of(encode(self))


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(TextBundle)


def encode(bundle: TextBundle) -> bytes:
    """Canonical JSON: the same bundle gives the same bytes."""
    return _encoder.encode(bundle)


def digest_of(encoded: bytes) -> Digest:
    """The digest of an encoded bundle."""
    return Digest(blake3(encoded).hexdigest())


def decode(data: bytes) -> TextBundle:
    """Decode a bundle.

    Raises:
        BadCheckpoint: the bytes are no bundle, or too many.
    """
    if len(data) > MAX_BUNDLE_BYTES:
        raise BadCheckpoint(
            f"a text bundle of {len(data)} bytes; at most {MAX_BUNDLE_BYTES} are taken"
        )
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadCheckpoint(f"not a text bundle: {error}") from error


def bundle_from_files(files: Mapping[str, bytes]) -> TextBundle:
    """Make a bundle from a checkpoint's text files, by name; files of other names are not looked
    at.

    Raises:
        BadCheckpoint: ``tokenizer.json`` is missing, or a file is broken or too large; the message
            names it.
    """
    if TOKENIZER_FILE not in files:
        raise BadCheckpoint(
            f"there is no {TOKENIZER_FILE}: export the tokenizer as a fast tokenizer"
        )
    tokenizer_json = _text(files, TOKENIZER_FILE, MAX_TOKENIZER_BYTES)
    parse_tokenizer(tokenizer_json)
    try:
        tokenizer_config = _json(files, TOKENIZER_CONFIG_FILE)
        special_tokens = _special_tokens(_json(files, SPECIAL_TOKENS_FILE)) | _special_tokens(
            tokenizer_config
        )
        add_bos_token = (
            tokenizer_config.flag("add_bos_token", default=False)
            if tokenizer_config.has("add_bos_token")
            else None
        )
        generation = parse_generation(_json(files, GENERATION_FILE), _json(files, CONFIG_FILE))
        template = _template(files, tokenizer_config)
    except CheckpointError as error:
        raise BadCheckpoint(str(error)) from error
    if template is not None:
        check_template(template)
    return TextBundle(
        tokenizer_json=tokenizer_json,
        chat_template=template,
        special_tokens=special_tokens,
        add_bos_token=add_bos_token,
        generation=generation,
    )


def parse_tokenizer(tokenizer_json: str) -> tokenizers.Tokenizer:
    """Build the tokenizer that a ``tokenizer.json`` describes.

    Raises:
        BadCheckpoint: it describes none.
    """
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_json)
    except BaseException as error:
        # The binding raises the bare class for whatever is wrong with the text, and some of its
        # parts panic.
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise BadCheckpoint(f"{TOKENIZER_FILE}: {error}") from error


def _text(files: Mapping[str, bytes], name: str, limit_bytes: int) -> str:
    data = files[name]
    if len(data) > limit_bytes:
        raise BadCheckpoint(f"{name}: {len(data)} bytes; at most {limit_bytes} are read")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadCheckpoint(f"{name}: not UTF-8") from error


def _json(files: Mapping[str, bytes], name: str) -> JsonObject:
    """A file that holds an object; an empty one when there is no such file."""
    return JsonObject.parse(
        _text(files, name, MAX_CONFIG_BYTES).encode() if name in files else b"{}", name
    )


def _special_tokens(place: JsonObject) -> dict[str, str]:
    """Special tokens by role. Each stands as a string, or as an object with its ``content``."""
    found: dict[str, str] = {}
    for role in _SPECIAL_TOKENS:
        if not place.has(role):
            continue
        described = place.child(role) if isinstance(place.raw(role), dict) else None
        token = place.text(role) if described is None else described.text("content")
        if len(token) > MAX_SPECIAL_TOKEN_CHARS:
            raise place.fault(role, f"is longer than {MAX_SPECIAL_TOKEN_CHARS} characters")
        found[role] = token
    return found


def _template(files: Mapping[str, bytes], tokenizer_config: JsonObject) -> str | None:
    """The chat template: its own file goes before the configuration, as in transformers; of
    several, the one named default.
    """
    if TEMPLATE_FILE in files:
        return _text(files, TEMPLATE_FILE, 4 * MAX_TEMPLATE_CHARS)
    if not tokenizer_config.has("chat_template"):
        return None
    if not isinstance(tokenizer_config.raw("chat_template"), list):
        return tokenizer_config.text("chat_template")
    for entry in tokenizer_config.items("chat_template"):
        if not isinstance(entry, dict):
            raise tokenizer_config.fault("chat_template", "holds more than objects")
        named = JsonObject(cast("dict[str, Any]", entry), TOKENIZER_CONFIG_FILE, "chat_template.")
        if named.text("name") == "default":
            return named.text("template")
    return None
