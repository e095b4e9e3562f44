"""What an engine says of a request's prompt, with its first token."""

from pilotlight.common.messages.codec import Message


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """Log probabilities of a prompt's tokens, each given those before it; the first has none.

    ::

        prompt_ids   0   1   2   3
        rows             0   1   2
    """

    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    """Of the same tokens: how many are at least as probable, from 1."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Ids and log probabilities of the most probable tokens in each place."""
