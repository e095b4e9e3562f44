"""What a graph may consist of, and which images are kept for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.policy.graphs.restorable import (
    RESTORABLE,
    Node,
    NodeType,
    NotRestorable,
    require_restorable,
    used_images,
)

IMAGES = {"big": ["gemm", "norm", *(f"unused_{number}" for number in range(1000))], "own": ["norm"]}


def test_a_graph_of_known_kernels_is_taken() -> None:
    nodes = [Node(0, "gemm"), Node(0, "norm"), *(Node(int(kind)) for kind in RESTORABLE if kind)]
    require_restorable(nodes, IMAGES)


@pytest.mark.parametrize("kind", [one for one in range(20) if one not in (0, 1, 2, 5)])
def test_every_other_type_of_node_is_refused_by_its_name(kind: int) -> None:
    names = {3: "host", 4: "graph", 10: "mem_alloc", 13: "conditional", 14: "type_14"}
    with pytest.raises(NotRestorable) as refused:
        require_restorable([Node(5), Node(kind)], IMAGES)
    assert refused.value.what == names.get(kind, refused.value.what)
    assert refused.value.what == (NodeType(kind).name.lower() if kind < 14 else f"type_{kind}")


@pytest.mark.parametrize(
    "kernel",
    [
        "_ZN2at6native43distribution_elementwise_grid_stride_kernelIfLi4EZ",
        "_ZN2at6native20fused_dropout_kernelE15PhiloxCudaState",
        "curand_uniform4",
        "randperm_handle_duplicate_keys_kernel",
    ],
)
def test_kernels_that_draw_random_numbers_are_refused(kernel: str) -> None:
    with pytest.raises(NotRestorable, match="random numbers") as refused:
        require_restorable([Node(0, kernel)], {"image": [kernel]})
    assert refused.value.what == "random"


def test_a_kernel_without_an_image_is_refused() -> None:
    with pytest.raises(NotRestorable, match="no recorded image has softmax"):
        require_restorable([Node(0, "softmax")], IMAGES)


def test_images_are_kept_for_what_is_used_of_them() -> None:
    nodes = [Node(0, "norm"), Node(0, "gemm"), Node(2)]
    assert used_images(nodes, IMAGES) == {"big": ["gemm", "norm"]}, "it is kept anyway"
    assert used_images([Node(0, "norm")], IMAGES) == {"own": ["norm"]}, "the smaller one"
    assert used_images([Node(2)], IMAGES) == {}


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.sets(st.sampled_from("klmnopq"), min_size=1), min_size=1
    ),
    st.data(),
)
def test_every_kernel_is_kept_once_and_nothing_else(
    images: dict[str, set[str]], data: st.DataObject
) -> None:
    there = sorted(set().union(*images.values()))
    wanted = data.draw(st.lists(st.sampled_from(there)))
    kept = used_images([Node(0, kernel) for kernel in wanted], images)
    assert sorted(kernel for kernels in kept.values() for kernel in kernels) == sorted(set(wanted))
    assert all(set(kernels) <= images[image] for image, kernels in kept.items())
