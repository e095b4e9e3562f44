"""Settings of the loader."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from pilotlight.checkpoint.manifest import CHUNK_BYTES
from pilotlight.common.model_roots import ModelRootsSettings
from pilotlight.common.settings import ServiceSettings
from pilotlight.dataplane.bandwidth import parse_bandwidth

MIN_POOL_BYTES = 1024 * 1024


class LoaderSettings(ServiceSettings, ModelRootsSettings):
    """What a node's agent needs beside what every service does."""

    state_dir: Path = Field(
        Path(".pilotlight/state"),
        description="Folder for what must outlive a restart: the node's id, its workers.",
    )
    log_dir: Path = Field(
        Path(".pilotlight/logs"),
        description="Folder for the logs of the workers that the loader spawns. `-`: they write where it does.",
    )
    pool_path: Path | None = Field(
        None,
        description="File of the host pool, in shared memory or on hugetlbfs. By default /dev/shm/pilotlight-NODE.pool; `pilotlight up` "
        "names it by its state folder.",
    )
    pool_bytes: int | None = Field(
        None,
        ge=MIN_POOL_BYTES,
        description="Size of the host pool. By default a quarter of the host's or the container's memory, and at most nine tenths of "
        "the file system that it is in (/dev/shm).",
    )
    disk_tier_dir: Path | None = Field(
        None,
        description="Folder on a local disk in which chunks of models are kept beyond what fits into the host pool. Empty: none are.",
    )
    disk_tier_bytes: int = Field(
        64 * 1024**3,
        ge=CHUNK_BYTES,
        description="Bytes that the folder's files may take of the disk, at most.",
    )
    pool_socket: Path | None = Field(
        None, description="Unix socket for workers. By default pool.sock in the run folder."
    )
    pool_ahead: bool | None = Field(
        None,
        description="Whether the host pool takes its memory from the system when the loader starts, in the background and as far as it "
        "is unused, rather than with the first fetches. By default where the workers compute on GPUs.",
    )
    link: str = Field(
        "",
        description="Bandwidth that fetches from one source may take together: `200mbit`, `25gbit`, `125MB/s`. Empty: no limit.",
    )
    nic_bandwidth: str = Field(
        "10gbit",
        description="Bandwidth of the node's network interface, which placement counts with.",
    )
    fetch_threads: int = Field(
        16,
        ge=1,
        le=256,
        description="Threads that read chunks, for all fetches together: most chunks that are read at once.",
    )
    fetch_reads: int = Field(
        4,
        ge=1,
        le=256,
        description="Chunks that are read from one source at once to begin with, and at the least. More are, up to the threads, where the "
        "link gives more then. From folders of this host and from the disk tier, one for each core to begin with if those are more.",
    )
    dataplane_host: str = Field(
        "127.0.0.1",
        description="Address at which other nodes ask for chunks of models, and by which they know it. `0.0.0.0`: every address; they "
        "then know it by the host's name. Needs the secret `cluster-key`.",
    )
    dataplane_port: int = Field(
        0, ge=0, le=65535, description="Port at which other nodes ask for chunks. 0: any free one."
    )
    link_transport: Literal["tcp", "nixl", "auto"] = Field(
        "tcp",
        description="How chunks come from other nodes that can do the same. `nixl`: NIXL reads them out of the other's memory, by RDMA "
        "where there is a device; needs `pip install 'pilotlight-dataplane[nixl]'`. `auto`: so where there is an RDMA device. Where it "
        "fails they come over TCP.",
    )
    stall_timeout_s: float = Field(
        10.0, gt=0, description="A source that gives no byte for this long has stalled."
    )
    workers: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="Workers of the node, among which its memory and cores are divided. By default one for each GPU, or one.",
    )
    worker_kind: Literal["auto", "cpu", "cuda", "sim"] = Field(
        "auto",
        description="What the workers run models on: CPU cores, a GPU each, or a simulation. `auto`: GPUs where there is one for each "
        "worker and they can be used, else CPU cores.",
    )
    start_prefetch: bool = Field(
        True,
        description="Parameters come to the node while its worker gets ready for them. Off, set on loader and workers: not before the "
        "engine's process is there; for measurements.",
    )
    handover: bool = Field(
        False,
        description="When the loader stops, leave workers and host pool to the next one: streams go on through an upgrade.",
    )

    @field_validator("disk_tier_dir", "pool_ahead", "workers", mode="before")
    @classmethod
    def _is_none_if_empty(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("link", "nic_bandwidth")
    @classmethod
    def _is_bandwidth(cls, value: str) -> str:
        parse_bandwidth(value)
        return value

    @model_validator(mode="after")
    def _has_threads_to_begin_with(self) -> Self:
        if self.fetch_reads > self.fetch_threads:
            raise ValueError(
                f"fetch_reads ({self.fetch_reads}) must not be above fetch_threads ({self.fetch_threads})"
            )
        return self

    @property
    def socket(self) -> Path:
        """Where workers connect."""
        return self.pool_socket or self.run_dir / "pool.sock"

    @property
    def nic_bytes_per_s(self) -> float:
        """What placement counts with: the interface, or the link's limit where that is lower."""
        nic, link = parse_bandwidth(self.nic_bandwidth), parse_bandwidth(self.link)
        known = [bandwidth for bandwidth in (nic, link) if bandwidth is not None]
        return min(known) if known else 0.0
