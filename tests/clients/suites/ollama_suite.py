"""What Ollama's client for Python does."""

import os

import ollama
import pytest

MODEL = "ember-7m"
TURNS = [{"role": "user", "content": "What is a pilot light?"}]
OPTIONS = {"temperature": 0, "num_predict": 40}


@pytest.fixture(scope="module")
def client() -> ollama.Client:
    bearer = {"Authorization": f"Bearer {os.environ['PILOTLIGHT_API_KEY']}"}
    return ollama.Client(host=os.environ["PILOTLIGHT_URL"], headers=bearer)


def test_a_model_is_loaded_by_asking_nothing(client: ollama.Client) -> None:
    loaded = client.generate(model=MODEL)
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
    again = client.chat(model=MODEL, keep_alive="5m")
    assert (again.done, again.done_reason, again.message.content) == (True, "load", "")
    (only,) = client.generate(model=MODEL, stream=True)
    assert only.done_reason == "load"


def test_a_loaded_model_is_not_unloaded(client: ollama.Client) -> None:
    client.generate(model=MODEL)
    with pytest.raises(ollama.ResponseError, match="stays loaded") as refused:
        client.generate(model=MODEL, keep_alive=0)
    assert refused.value.status_code == 403


def test_a_chat(client: ollama.Client) -> None:
    answer = client.chat(model=MODEL, messages=TURNS, options=OPTIONS)
    assert "pilot light" in answer.message.content.lower()
    parts = list(client.chat(model=MODEL, messages=TURNS, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == answer.message.content
    assert parts[-1].done_reason == answer.done_reason


def test_a_prompt(client: ollama.Client) -> None:
    answer = client.generate(model=MODEL, prompt="A pilot light", options=OPTIONS)
    assert answer.response
    assert 0 < answer.eval_count <= OPTIONS["num_predict"]


def test_lists_and_details(client: ollama.Client) -> None:
    assert MODEL in [one.model for one in client.list().models]
    assert {one.model for one in client.ps().models} <= {one.model for one in client.list().models}
    assert "completion" in client.show(MODEL).capabilities
    assert client.pull(MODEL).status == "success"


def test_a_model_that_is_not_there(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat(model="none", messages=TURNS)
    assert refused.value.status_code == 404
