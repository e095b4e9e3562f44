"""Kernel images and archives of graphs, made byte by byte: written apart from what reads them."""

import struct

KERNEL, DEVICE_FUNCTION = 0x10, 0
NO_BITS, NV_INFO, NV_CALLGRAPH = 8, 0x70000000, 0x70000001
SHARED_BYTES = 1024


def note(kind, *words):
    payload = struct.pack(f"<{len(words)}I", *words)
    return struct.pack("<BBH", 4, kind, len(payload)) + payload


def form_notes(sizes, threads):
    """Notes that say how a kernel's parameters lie, one behind the other, and with how many threads
    it must be launched.
    """
    notes, offset = b"", 0
    for ordinal, num_bytes in enumerate(sizes):
        offset = -(-offset // num_bytes) * num_bytes
        words = ordinal | offset << 16, num_bytes << 18
        notes += note(0x17, 0, *words)
        offset += num_bytes
    return notes + note(0x10, threads, 1, 1)


class ImageMaker:
    """An image of the form that the driver's compiler gives: a section of code, notes and constants
    for each kernel.

    All kernels have ``code`` and ``notes`` beside their own, shared memory, and a table of jumps
    whose relocations older compilers leave there, empty. Those name a kernel's code in its notes
    and constants as the younger ones do, and set no flag for that.
    """

    def __init__(self, kernels, functions=("helper",), code=b"", notes=b"", *, old=False):
        belongs = 0 if old else 0x40
        self.names, self.bodies, self.kinds = [""], [b""], [(0, 0, 0, 0)]  # type, flags, link, info
        self.symbols = [("", 0, 0, 0)]  # name, info, other, section
        for function in functions:
            text = self.add(f".text.{function}", b"H" * 40, 1, 6)
            self.symbols.append((function, 0x02, DEVICE_FUNCTION, text))
        for kernel in kernels:
            text = self.add(f".text.{kernel}", kernel.encode() * 50 + code, 1, 6)
            self.symbols.append((kernel, 0x12, KERNEL, text))
            bank = self.add(
                f".nv.constant0.{kernel}", kernel.encode() * 3, 1, 2 | belongs, info=text
            )
            self.symbols.append((f".nv.constant0.{kernel}", 0x03, 0, bank))
            jumps = self.add(f".nv.constant2.{kernel}", b"jump" * 3, 1, 2 | belongs, info=text)
            self.add(f".rela.nv.constant2.{kernel}", b"", 4, belongs, info=jumps)
        number = {name: index for index, (name, *_) in enumerate(self.symbols)}
        for kernel in kernels:
            own = (
                note(0x0A, number[f".nv.constant0.{kernel}"], 0x200)
                + b"\x03\x19\x08\x00"
                + note(0x0F, number[functions[0]])
            )
            self.add(
                f".nv.info.{kernel}",
                own + notes,
                NV_INFO,
                belongs,
                info=self.names.index(f".text.{kernel}"),
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
        for kernel in kernels:
            text = self.names.index(f".text.{kernel}")
            self.add(f".nv.shared.{kernel}", bytes(SHARED_BYTES), NO_BITS, 3 | belongs, info=text)
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
            out += body if kind != NO_BITS else b""
            name_at += len(name) + 1 if name else 0
        out += b"\0" * (-len(out) % 8)
        sections, segments = len(out), len(out) + len(headers)
        first, last = self._ends(headers, ".text.")
        zeros, _ = self._ends(headers, ".nv.shared.")
        shared_bytes = SHARED_BYTES * sum(name.startswith(".nv.shared.") for name in self.names)
        out += headers
        for kind, flags, start, num_bytes, memory_bytes in (
            (6, 4, segments, 4 * 56, 4 * 56),
            (1, 4, segments, 4 * 56, 4 * 56),
            (1, 5, first, last - first, last - first),
            (1, 6, zeros, 0, shared_bytes),
        ):
            out += struct.pack("<IIQQQQQQ", kind, flags, start, 0, 0, num_bytes, memory_bytes, 8)
        ident = b"\x7fELF\x02\x01\x01" + b"\x33" + b"\0" * 8
        count = len(self.names)
        out[:64] = ident + struct.pack(
            "<HHIQQQIHHHHHH", 2, 190, 1, 0, segments, sections, 90, 64, 56, 4, 64, count, names
        )
        return bytes(out)

    def _ends(self, headers, prefix):
        """Where the sections with names of that kind begin and end in the file."""
        found = [index for index, name in enumerate(self.names) if name.startswith(prefix)]
        heads = [struct.unpack_from("<QQ", headers, 64 * index + 24) for index in found]
        return heads[0][0], sum(heads[-1])


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
        "data": ImageMaker(["kernel"]).image(),
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
        put(wanted["data"]),
    )
    kernels = put(struct.pack(KERNEL_ENTRY, name, layout, wanted["image"], 2, 0, -1, 0, 0))
    images, graphs = (
        put(struct.pack("<2Q", image, wanted.get("image_bytes", len(wanted["data"])))),
        put(graph),
    )
    total = wanted.get("total", len(out))
    out[: struct.calcsize(HEADER)] = struct.pack(
        HEADER, wanted["magic"], 1, 1, 1, 0, images, kernels, graphs, total, 0, 0
    )
    return bytes(out)


def archive_of_all_kinds():
    """Three graphs with every type of node, parameters both ways, attributes and two images."""
    out = bytearray(struct.calcsize(HEADER))

    def put(data):
        out.extend(b"\0" * (-len(out) % 16))
        out.extend(data)
        return len(out) - len(data)

    names = ["first", "second", "third"]
    images = [ImageMaker(names[:2]).image(), ImageMaker(names[2:]).image()]
    layouts = [(0, 8, 8, 8, 16, 4), (0, 1720), (0, 8)]
    graphs = []
    for tag in (1, 2, 256):
        parameters, nodes, edges = bytearray(), b"", b""
        kinds = [(5, 0, 0), (0, 0, 24), (1, 0, 200), (0, 1, 1720), (2, 0, 40), (0, 2, 8)]
        for number, (kind, kernel, num_bytes) in enumerate(kinds):
            parameters.extend(b"\0" * (-len(parameters) % 16))
            place = len(parameters)
            parameters.extend(bytes(range(8)) * (num_bytes // 8))
            first_edge = len(edges) // struct.calcsize(EDGE)
            for before in range(max(0, number - 2), number):
                edges += struct.pack(EDGE, before, number, b"\1\0\1" if number == 3 else b"")
            count = len(edges) // struct.calcsize(EDGE) - first_edge
            attributes = (kind == 0) * 2
            shape = (4, 1, 1, 128, 1, 1, 0) if kind == 0 else (0,) * 7
            packed = int(kernel == 1)
            fields = (num_bytes, 0, attributes, first_edge, count, 0)
            nodes += struct.pack(NODE, kind, kernel, *shape, packed, place, *fields)
        attributes = b"".join(struct.pack("<2I64s", one, 0, b"value") for one in (4, 5))
        places = put(nodes), put(edges), put(attributes), put(bytes(parameters)), len(parameters)
        counts = len(kinds), len(edges) // struct.calcsize(EDGE), 2, 0
        graphs.append(struct.pack(GRAPH, tag, *places, *counts))
    kernels = b""
    for number, (name, layout) in enumerate(zip(names, layouts, strict=True)):
        at = put(name.encode() + b"\0"), put(struct.pack(f"<{len(layout)}I", *layout))
        kernels += struct.pack(KERNEL_ENTRY, *at, number // 2, len(layout) // 2, 0, -1, 0, 0)
    placed = b"".join(struct.pack("<2Q", put(image), len(image)) for image in images)
    tables = put(placed), put(kernels), put(b"".join(graphs))
    out[: struct.calcsize(HEADER)] = struct.pack(
        HEADER, b"PLGRAPH1", 2, 3, 3, 0, *tables, len(out), 0x6000_0000_0000, 1 << 30
    )
    return bytes(out)
