"""The tokenizer: a byte-level BPE learned from the corpus, and the chat template that goes with
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from demo_model.corpus import Document, documents

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
# The trainer gives them the first ids, in this order.
SPECIAL_TOKENS = [BOS, END, PAD, *ROLE_TOKENS.values()]

VOCABULARY_SIZE = 4096
CONTEXT_TOKENS = 1024
_DOCUMENTS_TO_LEARN_FROM = 60_000

# A role that the model has not met (a tool's, say) is read as the user's, so that no request fails
# on its template. Tools are written as Hermes 2 writes them; the model has learned nothing of them.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>Tools: ' + (tools | tojson) + ' A call: <tool_call>\\n{\"name\": ..., \"arguments\": ...}\\n</tool_call><|end|>' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% set role = message['role'] if message['role'] in ['system', 'assistant'] else 'user' %}"
    "{{ '<|' + role + '|>' + (message['content'] or '') | trim }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}\\n</tool_call>' + ('' if loop.last else '\\n') }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document as token ids, with a flag beside each: does it count in the loss?"""

    ids: list[int]
    learned: list[bool]


def train_tokenizer(seed: int) -> Tokenizer:
    """Learn the merges; a plain completion gets its BOS from the post-processor, a chat from the
    template.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents(seed, _DOCUMENTS_TO_LEARN_FROM)), trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return tokenizer


def _texts(source: Iterable[Document]) -> Iterator[str]:
    return (segment.text for document in source for segment in document)


def encode_documents(tokenizer: Tokenizer, source: list[Document]) -> list[Encoded]:
    """Encode documents as the chat template would write them."""
    texts = [segment.text for document in source for segment in document]
    pieces = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    bos, end = SPECIAL_TOKENS.index(BOS), SPECIAL_TOKENS.index(END)
    roles = {role: SPECIAL_TOKENS.index(token) for role, token in ROLE_TOKENS.items()}
    encoded: list[Encoded] = []
    for document in source:
        ids, learned = [bos], [False]
        for segment in document:
            opening = [roles[segment.role]] if segment.role in roles else []
            body = [*next(pieces).ids, end]
            ids += opening + body
            learned += [False] * len(opening) + [segment.learned] * len(body)
        encoded.append(Encoded(ids, learned))
    return encoded


def tokenizer_config() -> dict[str, object]:
    """The contents of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": list(ROLE_TOKENS.values()),
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
