"""``/tokenize`` and ``/detokenize``."""

import pytest

pytestmark = pytest.mark.anyio

TEXT = "The quick brown fox 😀 jumps."
HELLO = [{"role": "user", "content": "hello"}]


async def post(world, path, **body):
    return await world.http.post(path, json={"model": "fox", **body})


async def test_a_text_there_and_back(world):
    made = (await post(world, "/tokenize", prompt=TEXT, add_special_tokens=False)).json()
    assert made["tokens"] == world.ids(TEXT)
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 4096)
    assert made["token_strs"] is None
    back = await post(world, "/detokenize", tokens=made["tokens"])
    assert back.json() == {"prompt": TEXT}


async def test_special_tokens_of_a_text(world):
    with_them = (await post(world, "/tokenize", prompt=TEXT)).json()["tokens"]
    assert with_them == world.tokenizer.encode(TEXT, add_special_tokens=True)
    assert (await post(world, "/tokenize", prompt="")).json()["tokens"] == []


async def test_the_texts_of_tokens(world):
    made = (
        await post(
            world, "/tokenize", prompt="quick fox", add_special_tokens=False, return_token_strs=True
        )
    ).json()
    assert "".join(made["token_strs"]) == "quick fox"


async def test_a_conversation_is_what_the_engine_gets(world):
    worker = await world.worker()
    made = (await post(world, "/tokenize", messages=HELLO)).json()
    await world.client.chat.completions.create(model="fox", messages=HELLO)
    assert made["tokens"] == worker.submits[0].prompt_ids
    open_ended = (
        await post(world, "/tokenize", messages=HELLO, add_generation_prompt=False)
    ).json()
    assert made["tokens"][: open_ended["count"]] == open_ended["tokens"]


async def test_many_ids(make_world):
    world = await make_world(max_context_tokens=100_000)
    ids = world.ids("hello fox ") * 5000
    assert (await post(world, "/detokenize", tokens=ids)).json()["prompt"] == "hello fox " * 5000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x " * 5000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
async def test_refused_by_name(world, path, body, param):
    response = await post(world, path, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
