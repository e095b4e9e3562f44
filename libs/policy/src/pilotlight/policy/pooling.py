"""What a model that gives vectors or scores makes of a text, and what is asked of it."""

from dataclasses import dataclass
from enum import StrEnum


class Task(StrEnum):
    """What a model is for."""

    GENERATE = "generate"
    """It continues texts."""
    EMBED = "embed"
    """It makes a vector of a text."""
    SCORE = "score"
    """It says how well a second text goes with a first one."""


class PoolingMode(StrEnum):
    """Which of a text's last hidden states become its one vector."""

    MEAN = "mean"
    """The mean of all of them."""
    CLS = "cls"
    """The first one's."""
    LAST = "last"
    """The last one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """How a checkpoint's hidden states become what it answers.

    The vector of an embedding model; of a cross-encoder (Nogueira and Cho 2019, section 3.1) the
    one label of its classifier.
    """

    mode: PoolingMode
    task: Task = Task.EMBED
    normalize: bool = False
    """Vectors have length 1."""
    dimensions: tuple[int, ...] = ()
    """Lengths to which vectors may be cut (Kusupati et al. 2022, section 3); none: any."""
    sigmoid: bool = False
    """Scores are put through the logistic function."""
    answers: tuple[str, ...] = ()
    """Two tokens, of which the second says that the texts go together: the score is the probability
    of that one against the first. None: the model has a classifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """What an encoder of BERT's kind (Devlin et al. 2019, section 3) has beside a decoder's
    settings.

    Every token sees every other one. ``ModelSpec.rms_norm_eps`` is the epsilon of its layer norms;
    nothing turns, so ``rope_theta`` says nothing.
    """

    first_position: int
    """What is added to a token's place in the text to find its position embedding."""
    num_positions: int
    """Position embeddings there are."""
    num_types: int
    """Token types there are: of a first and a second text."""
    activation: str
    """By transformers' name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """What a request asks in the place of output: its prompt's vector, or its score."""

    mode: PoolingMode
    """The model's. Where it is not the last state alone, the whole prompt has to run."""
    dimensions: int | None = None
    """The vector is cut to this length, and made of length 1 again where it was; None: all of
    it."""
    second_starts: int | None = None
    """Place of the first token of the second text, for models that tell them apart by token
    types."""
    answers: tuple[int, ...] = ()
    """Ids of ``Pooling.answers``."""
