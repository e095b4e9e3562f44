"""Tokenizers for grammars: fetched once, and readable by another process."""

import sys

import anyio
import pytest

from pilotlight.common.errors import NotFound
from pilotlight.common.store import ObjectStore, text_key
from pilotlight.text.bundle import TextBundle, encode
from pilotlight.text.testing import ascii_json
from pilotlight.worker import vocabularies
from pilotlight.worker.vocabularies import Vocabularies

pytestmark = pytest.mark.anyio


async def test_a_tokenizer_is_fetched_once_and_another_process_reads_it(tmp_path):
    store = ObjectStore.from_url(tmp_path.as_uri())
    bundle = TextBundle(tokenizer_json=ascii_json())
    await store.put_if_absent(text_key(bundle.digest()), encode(bundle))
    known = Vocabularies(store)
    vocabulary = await known.get(bundle.digest())
    (tmp_path / text_key(bundle.digest())).unlink()
    assert await known.get(bundle.digest()) == vocabulary
    program = f"import sys; sys.stdout.buffer.write(open({vocabulary.path!r}, 'rb').read())"
    read = await anyio.run_process([sys.executable, "-c", program])
    assert read.stdout.decode() == ascii_json()
    known.close()
    with pytest.raises(NotFound):
        await known.get(bundle.digest())


async def test_only_some_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabularies, "KEPT", 1)
    store = ObjectStore.from_url(tmp_path.as_uri())
    bundles = [
        TextBundle(tokenizer_json=ascii_json(), special_tokens={"eos_token": name})
        for name in ("a", "b")
    ]
    for bundle in bundles:
        await store.put_if_absent(text_key(bundle.digest()), encode(bundle))
    known = Vocabularies(store)
    first, second = [await known.get(bundle.digest()) for bundle in bundles]
    assert first != second, "though they may be at the same place"
    assert len(known._kept) == 1
    assert await anyio.Path(second.path).read_text() == ascii_json()
    known.close()
    assert not await anyio.Path(second.path).exists()
