"""Metrics of every service on this machine in one page: other services serve theirs on Unix sockets
only.
"""

import asyncio
import math
import re
from collections.abc import Iterable
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

log = structlog.get_logger()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DEADLINE_S = 1.0
MAX_SOCKETS = 256
MAX_PAGE_BYTES = 4 * 1024 * 1024
_SOCKET = re.compile(r"(gateway|scheduler|cache|loader|worker|materializer)-(\d+)\.sock")
_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: local\r\nConnection: close\r\n\r\n"


async def collect(
    registry: CollectorRegistry, run_dir: Path, own_pid: int, metrics_dir: Path | None = None
) -> bytes:
    """This process's metrics, then those of its neighbours, each labelled with its ``service`` and
    ``process``.

    Neighbours have their sockets in ``metrics_dir`` or in a folder of it: containers of one host,
    where process ids are the same in many, have one each.

    Args:
        registry: this process's metrics.
        run_dir: the folder of this process's own socket.
        own_pid: this process's id.
        metrics_dir: the folder of the neighbours' sockets; None: ``run_dir``.
    """
    own, around = run_dir / f"gateway-{own_pid}.sock", metrics_dir or run_dir
    pages = [
        ("gateway", _process_of(own, str(own_pid), around), generate_latest(registry).decode())
    ]
    found = [
        (path, match[1], _process_of(path, match[2], around))
        for path in await asyncio.to_thread(
            lambda: sorted([*around.glob("*.sock"), *around.glob("*/*.sock")])
        )
        if (match := _SOCKET.fullmatch(path.name)) is not None and path != own
    ]
    answers = await asyncio.gather(*(_scrape(path) for path, _, _ in found[:MAX_SOCKETS]))
    pages += [
        (service, process, page)
        for (_, service, process), page in zip(found, answers, strict=False)
        if page
    ]
    return _merged(pages).encode()


def _process_of(path: Path, pid: str, around: Path) -> str:
    return pid if path.parent == around else f"{path.parent.name}-{pid}"


async def _scrape(path: Path) -> str:
    """One neighbour's page; nothing when it does not answer: a socket may outlive its process."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(_REQUEST)
                answer = await reader.read(MAX_PAGE_BYTES)
                while len(answer) < MAX_PAGE_BYTES and (
                    more := await reader.read(MAX_PAGE_BYTES - len(answer))
                ):
                    answer += more
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        log.debug("no metrics", action="scrape_failed", path=str(path), error=repr(error))
        return ""
    head, _, body = answer.partition(b"\r\n\r\n")
    return body.decode(errors="replace") if b" 200 " in head.split(b"\r\n", 1)[0] else ""


def _merged(pages: Iterable[tuple[str, str, str]]) -> str:
    """One page in which each metric is described once."""
    described: dict[str, str] = {}
    samples: dict[str, list[str]] = {}
    for service, process, page in pages:
        try:
            families = list(text_string_to_metric_families(page))
        except ValueError as error:
            log.warning(
                "metrics of a service are unreadable",
                action="scrape_unreadable",
                service=service,
                error=str(error),
            )
            continue
        for family in families:
            name = family.name + ("_total" if family.type == "counter" else "")
            kind = "untyped" if family.type == "unknown" else family.type
            described.setdefault(
                name, f"# HELP {name} {_escaped(family.documentation)}\n# TYPE {name} {kind}\n"
            )
            for sample in family.samples:
                labels = {**sample.labels, "service": service, "process": process}
                inner = ",".join(
                    f'{key}="{_escaped(value, quotes=True)}"' for key, value in labels.items()
                )
                samples.setdefault(name, []).append(
                    f"{sample.name}{{{inner}}} {_number(sample.value)}\n"
                )
    return "".join(described[name] + "".join(lines) for name, lines in samples.items())


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
