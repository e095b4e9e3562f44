"""One output from ids to text: what is shown, what is counted."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pilotlight.text.stream import OutputDelta, OutputText
from pilotlight.text.testing import CORPUS


def run(output, batches) -> tuple[str, int, str | None]:
    deltas = [*(output.feed(batch) for batch in batches), output.finish()]
    stops = [delta.stop for delta in deltas if delta.stop is not None]
    assert len(stops) <= 1
    return (
        "".join(d.text for d in deltas),
        sum(d.used_tokens for d in deltas),
        stops[0] if stops else None,
    )


def test_without_stop_strings_every_token_counts(byte_level):
    token_ids = byte_level.encode(CORPUS[0], add_special_tokens=False)
    assert run(OutputText(byte_level), [token_ids]) == (CORPUS[0], len(token_ids), None)


def test_tokens_past_the_stop_string_are_dropped(byte_level):
    token_ids = byte_level.encode("hello world, said the fox", add_special_tokens=False)
    needed = next(n for n in range(len(token_ids)) if "world" in byte_level.decode(token_ids[:n]))
    output = OutputText(byte_level, ["world"])
    assert run(output, [token_ids]) == ("hello ", needed, "world")
    assert needed < len(token_ids)
    assert output.feed(token_ids) == OutputDelta("", 0)
    assert output.finish() == OutputDelta("", 0)


def test_what_began_like_a_stop_string_comes_at_the_end(byte_level):
    token_ids = byte_level.encode("hello wor", add_special_tokens=False)
    output = OutputText(byte_level, ["world"])
    assert output.feed(token_ids).text == "hello "
    assert output.finish() == OutputDelta("wor", 0)


def test_a_stop_string_may_be_found_at_the_end(byte_level):
    token_ids = byte_level.encode("say hello", add_special_tokens=False)
    output = OutputText(byte_level, ["hello there", "llo"])
    assert output.feed(token_ids) == OutputDelta("say ", len(token_ids))
    assert output.finish() == OutputDelta("he", 0, "llo")


def test_a_stop_string_in_what_the_detokenizer_held(tokenizer):
    token_ids = tokenizer.encode("a 🦀", add_special_tokens=False)
    assert run(OutputText(tokenizer, ["🦀"]), [token_ids])[::2] == ("a ", "🦀")


@pytest.mark.slow
@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_batches_do_not_matter(tokenizer, data):
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=40))
    whole = tokenizer.decode(token_ids)
    stops = data.draw(st.lists(st.sampled_from([*whole, "he", "▁"]), max_size=3)) + (
        [whole[3:6]] if len(whole) > 5 else []
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5)))
    batches = [token_ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    shown, used, stop = run(OutputText(tokenizer, stops), batches)
    assert (shown, used, stop) == run(
        OutputText(tokenizer, stops), [[token_id] for token_id in token_ids]
    )
    assert shown == min(
        (whole[: whole.find(s)] for s in stops if s in whole), key=len, default=whole
    )
    assert used <= len(token_ids)
