"""Whatever config.json says, it is a ModelSpec or an error of the checkpoint."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.checkpoint.architectures import SUPPORTED_ARCHITECTURES
from pilotlight.checkpoint.config import declared_dtype, parse_config
from pilotlight.checkpoint.errors import CheckpointError
from pilotlight.checkpoint.testing import tiny_config
from pilotlight.policy.model import Dtype

KEYS = [
    *{key: None for name in SUPPORTED_ARCHITECTURES for key in tiny_config(name)},
    "rope_scaling",
    "rope_parameters",
]
KEYS += [
    "attention_bias",
    "layer_types",
    "hidden_act",
    "dtype",
    "use_sliding_window",
    "max_window_layers",
    "mlp_only_layers",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["rope_type", "factor", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@pytest.mark.slow
@given(
    st.sampled_from(sorted(SUPPORTED_ARCHITECTURES)),
    st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4),
)
def test_any_configuration_gives_a_spec_or_a_checkpoint_error(architecture, changes):
    data = json.dumps({**tiny_config(architecture), **changes}).encode()
    try:
        spec = parse_config(data, Dtype.FLOAT32)
        declared_dtype(data)
    except CheckpointError:
        return
    assert len(spec.part_bytes) == spec.num_layers + 2
