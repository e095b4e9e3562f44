"""Stands in for what vLLM's tests import of vLLM: its server is the one at ``PILOTLIGHT_URL``.

What those of its classes would do that are tested by themselves is not there: such tests are not
chosen.
"""

import os
import sys
from types import ModuleType, TracebackType
from unittest.mock import MagicMock

import openai

IMPORTED = (
    "torch",
    "vllm",
    "vllm.config",
    "vllm.entrypoints",
    "vllm.entrypoints.openai",
    "vllm.entrypoints.openai.chat_completion",
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.openai.completion",
    "vllm.entrypoints.openai.completion.protocol",
    "vllm.exceptions",
    "vllm.sampling_params",
    "vllm.tokenizers",
    "vllm.transformers_utils",
    "vllm.transformers_utils.repo_utils",
)


class RemoteOpenAIServer:
    """As the one of vLLM's ``tests/utils.py``, of a server that runs already."""

    def __init__(self, *_: object, **__: object) -> None:
        self._url, self._key = os.environ["PILOTLIGHT_URL"], os.environ["PILOTLIGHT_API_KEY"]

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It goes on."""

    def get_async_client(self, **more: object) -> openai.AsyncOpenAI:
        """A client of it."""
        return openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=self._key, max_retries=0)

    def url_for(self, *parts: str) -> str:
        """An address of it."""
        return "/".join((self._url, *parts))


for name in IMPORTED:
    sys.modules[name] = MagicMock()
utils = ModuleType("tests.utils")
vars(utils)["RemoteOpenAIServer"] = RemoteOpenAIServer
sys.modules["tests.utils"] = utils
