"""Kernel images and archives of graphs, without a device: what is left out, what is renumbered,
what is refused.
"""

import random
import struct

import pytest
from graph_archives import NO_BITS, SHARED_BYTES, ImageMaker, archive, archive_of_all_kinds

from pilotlight.native.graphs import add_image, check_image, prune_image, recorded_images
from pilotlight.native.library import NativeError, library
from pilotlight.policy.graphs.restorable import Node, NotRestorable, require_restorable


class Parsed:
    """Sections and symbols of an image, found by names: written apart from what is tested."""

    def __init__(self, image):
        fields = struct.unpack_from("<HHIQQQIHHHHHH", image, 16)
        sections, count, names = fields[5], fields[11], fields[12]
        heads = [
            struct.unpack_from("<IIQQQQIIQQ", image, sections + 64 * index)
            for index in range(count)
        ]
        self.bodies = [
            image[head[4] : head[4] + head[5]] if head[1] not in (0, NO_BITS) else b""
            for head in heads
        ]
        text = lambda body, at: body[at : body.index(b"\0", at)].decode()  # noqa: E731 - twice, on one line each
        self.names = [text(self.bodies[names], head[0]) for head in heads]
        self.heads = dict(zip(self.names, heads, strict=True))
        strings = self.bodies[self.heads[".symtab"][6]]
        self.symbols = [
            (text(strings, name), *rest)
            for name, *rest in struct.iter_unpack("<IBBHQQ", self.body(".symtab"))
        ]
        self.table, self.segments = (
            fields[4],
            [
                struct.unpack_from("<IIQQQQQQ", image, fields[4] + 56 * index)
                for index in range(fields[9])
            ],
        )

    def body(self, name):
        return self.bodies[self.names.index(name)]

    def symbol(self, number):
        return self.symbols[number][0]


def test_an_image_whose_tables_lie_outside_of_it_is_none():
    image = ImageMaker(["kernel"]).image()
    check_image(image)
    check_image(prune_image(image, ["kernel"]))
    for wrong in (b"", b"\x7fELF", image[:64], image[: len(image) // 2], b"x" + image[1:]):
        with pytest.raises(NativeError, match="does not hold together"):
            check_image(wrong)


def test_only_what_is_used_stays_and_everything_is_renumbered():
    kernels = [f"kernel_{index}" for index in range(20)]
    image = ImageMaker(kernels).image()
    keep = ["kernel_3", "kernel_17"]
    pruned = prune_image(image, keep)
    assert len(pruned) < len(image) / 3
    found = Parsed(pruned)
    assert {name for name in found.names if name.startswith(".text.")} == {
        ".text.helper",
        ".text.kernel_3",
        ".text.kernel_17",
    }
    assert found.body(".debug_frame") == b""
    for kernel in keep:
        text = found.heads[f".text.{kernel}"]
        assert found.body(f".text.{kernel}") == kernel.encode() * 50
        assert (found.symbol(text[7] & 0xFFFFFF), text[7] >> 24) == (kernel, 9)
        assert found.names[found.heads[f".nv.info.{kernel}"][7]] == f".text.{kernel}"
        assert found.names[found.heads[f".nv.info.{kernel}"][6]] == ".symtab"
        (number,) = [index for index, symbol in enumerate(found.symbols) if symbol[0] == kernel]
        assert found.names[found.symbols[number][3]] == f".text.{kernel}"
        notes = found.body(f".nv.info.{kernel}")
        assert found.symbol(struct.unpack_from("<I", notes, 4)[0]) == f".nv.constant0.{kernel}"
        assert found.symbol(struct.unpack_from("<I", notes, 20)[0]) == "helper"
        _, info, _ = struct.unpack("<QQq", found.body(f".rela.text.{kernel}"))
        assert found.symbol(info >> 32) == "helper"
        assert info & 0xFFFFFFFF == 2
    of_all = [
        struct.unpack_from("<BBHII", found.body(".nv.info"), at)
        for at in range(0, len(found.body(".nv.info")), 12)
    ]
    assert [(kind, found.symbol(symbol), value) for _, kind, _, symbol, value in of_all] == [
        (0x2F, "kernel_3", 32),
        (0x11, "kernel_3", 0),
        (0x2F, "kernel_17", 32),
        (0x11, "kernel_17", 0),
        (0x11, "helper", 7),
    ]
    calls = list(struct.iter_unpack("<II", found.body(".nv.callgraph")))
    assert calls[0] == (0, 0xFFFFFFFF)
    assert [tuple(map(found.symbol, call)) for call in calls[1:]] == [
        ("kernel_3", "helper"),
        ("kernel_17", "helper"),
    ]
    for table in found.segments[:2]:
        assert (table[2], table[5], table[6]) == (found.table, 4 * 56, 4 * 56)
    _, _, start, _, _, length, in_memory, _ = found.segments[2]
    assert start == found.heads[".text.helper"][4]
    assert length == in_memory
    last = found.heads[".nv.constant2.kernel_17"]
    assert start + length == last[4] + last[5], "the last that was in it"
    _, _, start, _, _, length, in_memory, _ = found.segments[3]
    assert start == found.heads[".nv.shared.kernel_3"][4]
    assert (length, in_memory) == (0, 2 * SHARED_BYTES)
    assert Parsed(prune_image(pruned, ["kernel_3"])).heads.keys() < found.heads.keys()


def test_all_kernels_kept_keep_everything_but_debugging():
    image = ImageMaker(["one", "two"]).image()
    before, after = Parsed(image), Parsed(prune_image(image, ["one", "two"]))
    assert before.names == after.names
    assert [segment[5:] for segment in before.segments] == [s[5:] for s in after.segments]
    assert [symbol[0] for symbol in before.symbols] == [symbol[0] for symbol in after.symbols]


def test_nothing_names_what_is_left_out():
    """The driver reads whatever lies where a section is said to be: a relocation of a dropped
    kernel's table of jumps, empty, in images by older compilers for one.
    """
    image = ImageMaker([f"kernel_{index}" for index in range(20)], old=True).image()
    found = Parsed(prune_image(image, ["kernel_0"]))
    assert [name for name in found.names if ".nv.constant2." in name] == [
        ".nv.constant2.kernel_0",
        ".rela.nv.constant2.kernel_0",
    ]
    for name, head in found.heads.items():
        names_section = name and name not in (".symtab", ".text.kernel_0", ".text.helper")
        assert head[6] < len(found.names)
        assert not names_section or head[7] < len(found.names), name
    jumps = found.heads[".rela.nv.constant2.kernel_0"][7]
    assert found.names[jumps] == ".nv.constant2.kernel_0"


def with_table(kernels, body, kind=4):
    """An image with a section of a library's own that belongs to no kernel."""
    maker = ImageMaker(kernels)
    place = maker.add(".nv.constant4", b"t" * 16, 1, 2)
    maker.add(".rela.nv.constant4", body, kind, 0x40, info=place)
    return maker.image()


def test_an_image_whose_parts_name_a_dropped_kernel_is_not_pruned():
    (number,) = [
        at for at, symbol in enumerate(ImageMaker(["one", "two"]).symbols) if symbol[0] == "two"
    ]
    image = with_table(["one", "two"], struct.pack("<QQq", 0, number << 32 | 2, 0))
    with pytest.raises(NativeError, match=r"rela.nv.constant4 names the symbol \d+, which is left"):
        prune_image(image, ["one"])
    assert Parsed(prune_image(image, ["one", "two"])).names == Parsed(image).names
    with pytest.raises(NativeError, match="of an unknown kind"):
        prune_image(with_table(["one", "two"], b"numbers", 0x70000085), ["one"])


def test_what_is_no_image_is_refused():
    image = ImageMaker(["one", "two"]).image()
    with pytest.raises(NativeError, match="no kernel three"):
        prune_image(image, ["three"])
    for broken in (b"", b"MZ" * 100, image[:63], image[:-70], image[: len(image) // 2]):
        with pytest.raises(NativeError, match="no ELF file"):
            prune_image(broken, ["one"])


def test_no_broken_image_breaks_the_process():
    """Any byte may be anything: it is refused, or pruned to something, and the process lives."""
    image = ImageMaker(["one", "two", "three"]).image()
    pick, refused = random.Random(11), 0
    for _ in range(3000):
        changed = bytearray(image)
        for _ in range(pick.randrange(1, 4)):
            changed[pick.randrange(len(changed))] = pick.choice(
                [0, 1, 0x7F, 0x80, 0xFF, pick.randrange(256)]
            )
        try:
            prune_image(bytes(changed), ["two"])
        except NativeError:
            refused += 1
    assert refused


def test_images_are_kept_once():
    before = recorded_images()
    image = ImageMaker([f"alone_{random.random()}"]).image()
    add_image(image)
    add_image(image)
    assert recorded_images() == (before[0] + 1, before[1] + len(image))
    with pytest.raises(NativeError, match="no kernel is in this image"):
        add_image(b"nothing")


def check(data):
    library().call("archive_check", data, len(data))


def test_an_archive_that_holds_together_is_taken():
    check(archive())
    check(archive_of_all_kinds())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"PLGRAPH0"}, "another version"),
        ({"total": 5}, "cut off"),
        ({"kernel": 1}, "has no kernel"),
        ({"from": 1}, "does not lead forward"),
        ({"to": 0}, "does not lead forward"),
        ({"param_bytes": 17}, "outside of its graph"),
        ({"params_at": 1 << 40}, "outside of its graph"),
        ({"param_bytes": 8}, "do not fit"),
        ({"layout": (0, 8, 12, 8)}, "do not fit"),
        ({"image": 1}, "kernel lies outside"),
        ({"first_edge": 1}, "outside of its graph"),
        ({"image_bytes": 1 << 62}, "image lies outside"),
        ({"image_bytes": 60}, "does not hold together"),
        ({"data": b"MZ" * 100}, "does not hold together"),
        ({"type": 3}, "a node of type host"),
    ],
)
def test_an_archive_that_does_not_is_refused(changes, message):
    with pytest.raises(NativeError, match=message):
        check(archive(**changes))


def test_no_broken_archive_breaks_the_process():
    good, pick, refused = archive(), random.Random(5), 0
    for length in range(0, len(good), 7):
        with pytest.raises(NativeError):
            check(good[:length])
    for _ in range(5000):
        changed = bytearray(good)
        changed[pick.randrange(len(changed))] = pick.choice([0xFF, 0x80, 1, pick.randrange(256)])
        try:
            check(bytes(changed))
        except NativeError:
            refused += 1
    assert refused > 500


@pytest.mark.parametrize("kind", range(-1, 20))
@pytest.mark.parametrize("kernel", ["nvjet_tst_192x8", "at_native_DISTRIBUTION_elementwise", ""])
def test_what_is_written_down_is_what_the_policy_takes(kind, kernel):
    """The driver's side refuses the same nodes, and by the same names."""
    refused, name = None, kernel if kind == 0 else ""
    try:
        require_restorable([Node(kind, name)], {"image": [name]})
    except NotRestorable as error:
        refused = error.what
    if refused is None:
        library().call("graphs_check_node", kind, name.encode())
    else:
        with pytest.raises(NativeError, match="random numbers" if refused == "random" else refused):
            library().call("graphs_check_node", kind, name.encode())
