"""LangChain's own standard tests of chat models, through ``langchain-openai``."""

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestPilotlight(ChatModelIntegrationTests):
    """What a chat model of LangChain has to do, whatever it says."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": f"{os.environ['PILOTLIGHT_URL']}/v1",
            "api_key": os.environ["PILOTLIGHT_API_KEY"],
            "model": "ember-7m",
            "max_tokens": 200,
            "temperature": 0,
            "stream_usage": True,
        }

    # The demo model has seven million parameters: it calls no tools by itself, and ends no string
    # of a form that a grammar holds it to.
    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False
