"""Bodies that text helpers decode, by the names that go to them."""

import msgspec

from pilotlight.gateway.schema.messages import CountRequest, MessagesRequest
from pilotlight.gateway.schema.ollama import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPromptRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from pilotlight.gateway.schema.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from pilotlight.gateway.schema.requests import ChatRequest, CompletionRequest
from pilotlight.gateway.schema.responses import ResponsesRequest
from pilotlight.gateway.schema.tokens import DetokenizeRequest, TokenizeRequest

KINDS: dict[str, type[msgspec.Struct]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
    "messages": MessagesRequest,
    "count": CountRequest,
    "responses": ResponsesRequest,
    "embedding": EmbeddingRequest,
    "rerank": RerankRequest,
    "score": ScoreRequest,
    "ollama_chat": OllamaChatRequest,
    "ollama_generate": OllamaGenerateRequest,
    "ollama_show": OllamaShowRequest,
    "ollama_pull": OllamaPullRequest,
    "ollama_embed": OllamaEmbedRequest,
    "ollama_prompt": OllamaPromptRequest,
}
KIND_OF = {kind: name for name, kind in KINDS.items()}
