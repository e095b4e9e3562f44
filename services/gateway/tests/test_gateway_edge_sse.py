"""Server-sent events as bytes."""

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.gateway.edge import sse


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text('a"\\\n', max_size=5))
def test_an_event_around_a_text_is_the_event_with_it(text: str, other: str) -> None:
    def shape(content: str) -> object:
        return {"id": other, "choices": [{"delta": {"content": content}, "index": 0}], "n": 1}

    assert sse.filled(sse.around(shape), text) == sse.event(shape(text))
