"""Bodies of ``/v1/embeddings`` (OpenAI's), ``/v1/rerank`` (Cohere's and Jina's) and ``/v1/score``
(vLLM's).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pilotlight.gateway.schema.requests import MAX_INT32, ModelName, TokenId

MAX_INPUTS = 2048
"""Texts of one request: OpenAI's number."""
MAX_DIMENSIONS = 1 << 18

Truncation = Annotated[
    int,
    Meta(
        ge=-1,
        le=MAX_INT32,
        description="Texts are cut to this number of tokens; -1: to what the model takes. Left out, longer ones are refused.",
    ),
]
Seconds = Annotated[float, Meta(gt=0, le=86_400, description="The answer comes by then, or none.")]
Dimensions = Annotated[
    int,
    Meta(
        ge=1,
        le=MAX_DIMENSIONS,
        description="Vectors are cut to this length, and made of length 1 again.",
    ),
]
Text = Annotated[str, Meta(min_length=1)]


class PooledRequest(msgspec.Struct, kw_only=True):
    """What all of them have."""

    model: ModelName = ""
    truncate_prompt_tokens: Truncation | None = None
    timeout_s: Seconds | None = None
    user: str | None = None


class EmbeddingRequest(PooledRequest, kw_only=True):
    """Body of ``POST /v1/embeddings``."""

    input: Annotated[
        str | list[str | int | list[TokenId]],
        Meta(description="A text, texts, token ids of one, or lists of these."),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None


class Embedding(msgspec.Struct, kw_only=True):
    """One vector; as base64, its float32 values, lowest byte first."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class PooledUsage(msgspec.Struct, kw_only=True):
    """What is billed."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, kw_only=True):
    """Response of ``POST /v1/embeddings``."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PooledUsage


class Document(msgspec.Struct, kw_only=True):
    """One text to be ranked."""

    text: Text


class RerankRequest(PooledRequest, kw_only=True):
    """Body of ``POST /v1/rerank``."""

    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=1, le=MAX_INT32)] | None = None
    return_documents: bool | None = None
    instruction: (
        Annotated[
            str,
            Meta(description="What counts as relevant, for models that are told so (Qwen3)."),
        ]
        | None
    ) = None


class Ranked(msgspec.Struct, kw_only=True):
    """A document and how relevant it is."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET
    """With ``return_documents``."""


class Reranked(msgspec.Struct, kw_only=True):
    """Response of ``POST /v1/rerank``: the most relevant first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage


class ScoreRequest(PooledRequest, kw_only=True):
    """Body of ``POST /v1/score``: one first text and one or many second ones, or as many of
    both.
    """

    text_1: Text | list[Text]
    text_2: Text | list[Text]
    instruction: str | None = None


class Score(msgspec.Struct, kw_only=True):
    """How well two texts go together."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(msgspec.Struct, kw_only=True):
    """Response of ``POST /v1/score``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage
