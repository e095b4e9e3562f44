"""The books of a copy of KV blocks that are being written."""

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.engine.core.copies import BlockCopies


@given(
    st.lists(st.one_of(st.just("ask"), st.sets(st.integers(0, 7), min_size=1)), max_size=40),
    st.integers(1, 4),
)
def test_a_copy_has_what_was_written_before_it_ended(events, at_most):
    """By brute force: contents are numbers of writes, and every question is answered at once."""
    copies, filled = BlockCopies(range(2, 5)), set()
    written, copied = {}, {}

    def ask():
        if (wanted := copies.next_of(filled, at_most)) is None:
            return False
        layer, blocks = wanted
        assert 0 < len(blocks) <= at_most
        copies.take(layer, blocks)
        copied.update({(layer, block): written[block] for block in blocks})
        return True

    for number, event in enumerate(events):
        if event == "ask":
            ask()
        else:
            filled |= event
            written |= dict.fromkeys(event, number)
            copies.wrote(event)
    while ask():
        pass
    assert copied == {(layer, block): written[block] for layer in range(2, 5) for block in filled}
