"""Kernel images and archives of graphs, without a device: what is left out, what is renumbered,
what is refused.
"""

import random
import struct

import pytest

from pilotlight.native.graphs import add_image, prune_image, recorded_images
from pilotlight.native.library import NativeError, library

KERNEL, DEVICE_FUNCTION = 0x10, 0
NV_INFO, NV_CALLGRAPH = 0x70000000, 0x70000001


def note(kind, *words):
    payload = struct.pack(f"<{len(words)}I", *words)
    return struct.pack("<BBH", 4, kind, len(payload)) + payload


class ImageMaker:
    """An image of the form that the driver's compiler gives: a section of code, notes and constants
    for each kernel.
    """

    def __init__(self, kernels, functions=("helper",)):
        self.names, self.bodies, self.kinds = [""], [b""], [(0, 0, 0, 0)]  # type, flags, link, info
        self.symbols = [("", 0, 0, 0)]  # name, info, other, section
        for function in functions:
            text = self.add(f".text.{function}", b"H" * 40, 1, 6)
            self.symbols.append((function, 0x02, DEVICE_FUNCTION, text))
        for kernel in kernels:
            text = self.add(f".text.{kernel}", kernel.encode() * 50, 1, 6)
            self.symbols.append((kernel, 0x12, KERNEL, text))
            bank = self.add(f".nv.constant0.{kernel}", kernel.encode() * 3, 1, 2, info=text)
            self.symbols.append((f".nv.constant0.{kernel}", 0x03, 0, bank))
        number = {name: index for index, (name, *_) in enumerate(self.symbols)}
        for kernel in kernels:
            notes = (
                note(0x0A, number[f".nv.constant0.{kernel}"], 0x200)
                + b"\x03\x19\x08\x00"
                + note(0x0F, number[functions[0]])
            )
            self.add(
                f".nv.info.{kernel}", notes, NV_INFO, 0x40, info=self.names.index(f".text.{kernel}")
            )
            relocation = struct.pack("<QQq", 8, number[functions[0]] << 32 | 2, 0)
            self.add(
                f".rela.text.{kernel}",
                relocation,
                4,
                0x40,
                info=self.names.index(f".text.{kernel}"),
            )
        of_all = b"".join(
            note(0x2F, number[kernel], 32) + note(0x11, number[kernel], 0) for kernel in kernels
        )
        self.add(".nv.info", of_all + note(0x11, number[functions[0]], 7), NV_INFO, 0)
        calls = b"".join(
            struct.pack("<II", number[kernel], number[functions[0]]) for kernel in kernels
        )
        self.add(".nv.callgraph", struct.pack("<II", 0, 0xFFFFFFFF) + calls, NV_CALLGRAPH, 0)
        self.add(".debug_frame", b"d" * 77, 1, 0)
        for kernel in (*kernels, *functions):
            place = self.names.index(f".text.{kernel}")
            self.kinds[place] = (*self.kinds[place][:3], number[kernel] | 9 << 24)

    def add(self, name, body, kind, flags, link=0, info=0):
        self.names.append(name)
        self.bodies.append(body)
        self.kinds.append((kind, flags, link, info))
        return len(self.names) - 1

    def image(self):
        strings, symbols = b"\0", b""
        for name, info, other, section in self.symbols:
            symbols += struct.pack(
                "<IBBHQQ", len(strings) if name else 0, info, other, section, 0, 16
            )
            strings += name.encode() + b"\0" if name else b""
        table = self.add(".symtab", symbols, 2, 0)
        self.kinds[table] = (2, 0, self.add(".strtab", strings, 3, 0), 1)
        for place, (kind, flags, _, info) in enumerate(self.kinds):
            if kind in (4, NV_INFO):
                self.kinds[place] = (kind, flags, table, info)
        names = self.add(".shstrtab", b"", 3, 0)
        self.bodies[names] = b"\0" + b"".join(name.encode() + b"\0" for name in self.names[1:])
        out, headers, name_at = bytearray(64), b"", 1
        for place, (name, body, (kind, flags, link, info)) in enumerate(
            zip(self.names, self.bodies, self.kinds, strict=True)
        ):
            out += b"\0" * (-len(out) % 16)
            start = len(out) if place else 0
            headers += struct.pack(
                "<IIQQQQIIQQ",
                name_at if name else 0,
                kind,
                flags,
                0,
                start,
                len(body),
                link,
                info,
                16,
                0,
            )
            out += body
            name_at += len(name) + 1 if name else 0
        out += b"\0" * (-len(out) % 8)
        sections, segments = len(out), len(out) + len(headers)
        text = [index for index, name in enumerate(self.names) if name.startswith(".text.")]
        first = struct.unpack_from("<Q", headers, 64 * text[0] + 24)[0]
        last = struct.unpack_from("<QQ", headers, 64 * text[-1] + 24)
        out += headers + struct.pack(
            "<IIQQQQQQ", 1, 5, first, 0, 0, sum(last) - first, sum(last) - first, 8
        )
        ident = b"\x7fELF\x02\x01\x01" + b"\x33" + b"\0" * 8
        count = len(self.names)
        out[:64] = ident + struct.pack(
            "<HHIQQQIHHHHHH", 2, 190, 1, 0, segments, sections, 90, 64, 56, 1, 64, count, names
        )
        return bytes(out)


class Parsed:
    """Sections and symbols of an image, found by names: written apart from what is tested."""

    def __init__(self, image):
        fields = struct.unpack_from("<HHIQQQIHHHHHH", image, 16)
        sections, count, names = fields[5], fields[11], fields[12]
        heads = [
            struct.unpack_from("<IIQQQQIIQQ", image, sections + 64 * index)
            for index in range(count)
        ]
        self.bodies = [image[head[4] : head[4] + head[5]] if head[1] else b"" for head in heads]
        text = lambda body, at: body[at : body.index(b"\0", at)].decode()  # noqa: E731 - twice, on one line each
        self.names = [text(self.bodies[names], head[0]) for head in heads]
        self.heads = dict(zip(self.names, heads, strict=True))
        strings = self.bodies[self.heads[".symtab"][6]]
        self.symbols = [
            (text(strings, name), *rest)
            for name, *rest in struct.iter_unpack("<IBBHQQ", self.body(".symtab"))
        ]
        (self.segment,) = struct.iter_unpack("<IIQQQQQQ", image[fields[4] : fields[4] + 56])

    def body(self, name):
        return self.bodies[self.names.index(name)]

    def symbol(self, number):
        return self.symbols[number][0]


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
    assert ".debug_frame" not in found.names
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
    start, length = found.segment[2], found.segment[5]
    assert start == found.heads[".text.helper"][4]
    assert start + length == found.heads[".nv.constant0.kernel_17"][4] + len("kernel_17" * 3), (
        "the last that was in it"
    )
    assert Parsed(prune_image(pruned, ["kernel_3"])).heads.keys() < found.heads.keys()


def test_all_kernels_kept_keep_everything_but_debugging():
    image = ImageMaker(["one", "two"]).image()
    before, after = Parsed(image), Parsed(prune_image(image, ["one", "two"]))
    assert [name for name in before.names if name != ".debug_frame"] == after.names
    assert [symbol[0] for symbol in before.symbols] == [symbol[0] for symbol in after.symbols]


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


HEADER, GRAPH, NODE, EDGE, KERNEL_ENTRY = "<8s4I6Q", "<6Q4I", "<2I3I3I2IQ6I", "<2I8s", "<2Q2I4i"


def archive(**changes):
    """One graph of an empty node and a kernel's behind it."""
    wanted = {
        "magic": b"PLGRAPH1",
        "kernel": 0,
        "from": 0,
        "to": 1,
        "param_bytes": 16,
        "params_at": 0,
        "image": 0,
        "layout": (0, 8, 8, 8),
        "first_edge": 0,
        "image_bytes": 32,
        "type": 5,
        **changes,
    }
    out = bytearray(struct.calcsize(HEADER))

    def put(data):
        out.extend(b"\0" * (-len(out) % 16))
        out.extend(data)
        return len(out) - len(data)

    nodes = struct.pack(NODE, wanted["type"], 0, *[0] * 6, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    nodes += struct.pack(
        NODE,
        0,
        wanted["kernel"],
        1,
        1,
        1,
        32,
        1,
        1,
        0,
        0,
        wanted["params_at"],
        wanted["param_bytes"],
        0,
        0,
        wanted["first_edge"],
        1,
        0,
    )
    edges = struct.pack(EDGE, wanted["from"], wanted["to"], b"")
    places = put(nodes), put(edges), put(b""), put(b"p" * 16), 16
    graph = struct.pack(GRAPH, 7, *places, 2, 1, 0, 0)
    name, layout, image = (
        put(b"kernel\0"),
        put(struct.pack("<4I", *wanted["layout"])),
        put(b"i" * 32),
    )
    kernels = put(struct.pack(KERNEL_ENTRY, name, layout, wanted["image"], 2, 0, -1, 0, 0))
    images, graphs = put(struct.pack("<2Q", image, wanted["image_bytes"])), put(graph)
    total = wanted.get("total", len(out))
    out[: struct.calcsize(HEADER)] = struct.pack(
        HEADER, wanted["magic"], 1, 1, 1, 0, images, kernels, graphs, total, 0, 0
    )
    return bytes(out)


def check(data):
    library().call("archive_check", data, len(data))


def test_an_archive_that_holds_together_is_taken():
    check(archive())


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
        ({"type": 3}, "do not fit"),
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
