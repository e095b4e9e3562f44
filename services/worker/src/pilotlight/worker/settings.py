"""Settings of a worker process."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from pilotlight.common.settings import ServiceSettings


class WorkerSettings(ServiceSettings):
    """What a worker needs to know beside what every service does."""

    worker_id: str = Field(
        "",
        description="Name of the worker: the same after a restart. By default the node's with an index.",
    )
    node_id: str = Field("node-local", description="Name of the node that the worker belongs to.")
    log_dir: Path = Field(
        Path(".pilotlight/logs"),
        description="Folder for the log of the worker's engine. `-`: it writes where the worker does.",
    )
    state_dir: Path | None = Field(
        None,
        description="The loader's folder for what must outlive a restart: workers keep there how often graphs of artifacts were used, "
        "and what a GPU's next start can begin with. Empty: that is forgotten when a worker ends.",
    )
    device: Literal["cpu", "cuda", "sim"] = Field(
        "cpu", description="What runs models: CPU cores, an NVIDIA GPU, or a simulation."
    )
    cuda_device: str = Field(
        "",
        pattern=r"^([0-9]+|(GPU|MIG)-[0-9A-Za-z./-]+)?$",
        description="The worker's GPU: its UUID, or its index as nvidia-smi counts. Empty: the first one.",
    )
    step_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="Tokens of prompts and outputs that the engine runs at once, at most. By default 512 on CPU cores, 10,240 on a GPU.",
    )
    workers: int = Field(
        1,
        ge=1,
        le=1024,
        description="Workers of the node, among which its memory and cores are divided.",
    )
    device_bytes: int | None = Field(
        None,
        ge=1,
        description="Memory for models on the worker's device. By default half of the host's or the container's, divided by its workers; "
        "of a GPU, what is free when the engine starts, but for what it keeps for itself.",
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads that the engine computes with. By default the host's cores, divided by its workers.",
    )
    pool_socket: Path | None = Field(
        None,
        description="Unix socket of the node's loader. A simulated worker needs none: it takes every part for ready.",
    )
    pool_path: Path | None = Field(
        None,
        description="File of the node's host pool: a worker that starts reads there which epoch the loader has seen.",
    )
    dataplane_host: str = Field(
        "127.0.0.1",
        description="Address at which engines of other stages of a model connect to the worker's engine. Needs the secret `cluster-key`.",
    )
    max_requests: int = Field(
        256,
        ge=1,
        le=65_536,
        description="Requests that run or wait on one worker; more are refused with 429.",
    )
    spare_engine: bool = Field(
        True,
        description="Keep a second engine process that has its libraries imported, so that an engine that dies is replaced at once. "
        "It takes memory, and no processor.",
    )
    artifact_graphs: bool = Field(
        default=False,
        description="Record captured decode steps and compiled kernels in artifacts for GPUs, and restore them in starts. "
        "Off until whole systems have been measured with it beside requests.",
    )
    materialize_ranges: bool | None = Field(
        None,
        description="Where artifacts have graphs, they have those of the usual ranges of layers, too: halves and quarters, for stages of "
        "models that several workers start. By default where `PILOTLIGHT_MAX_STAGES` is above 1 for workers, too; no group of GPUs has "
        "run it yet.",
    )
    max_stages: int = Field(
        1,
        ge=1,
        le=8,
        description="The scheduler's: above 1, artifacts get graphs of ranges, unless `PILOTLIGHT_MATERIALIZE_RANGES` says otherwise.",
    )
    launch_lists: bool = Field(
        default=False,
        description="Where graphs are restored, a step whose kernels are loaded and whose graph is not ready is launched kernel by "
        "kernel. Off: it waits for its graph; what it is worth is not measured.",
    )
    graph_pointers: Literal["addresses", "indirect"] = Field(
        "addresses",
        description="How graphs in artifacts know their memory: by its addresses, or by what their addresses point to, for which a "
        "build records twice. For measurements.",
    )
    graph_kernels: Literal["images", "symbol", "trigger"] = Field(
        "images",
        description="Where kernels of restored graphs come from: images in the artifact, symbols of libraries, or modules that the "
        "first layer loads. For measurements.",
    )
    builds: bool = Field(
        True,
        description="Build artifacts of models, in an engine process of its own, while there is no demand. Needs the secret `cluster-key`.",
    )
    build_idle_s: float = Field(
        2.0,
        gt=0,
        description="Seconds without a load or a request after which a worker looks for something to build.",
    )
    start_warm: bool = Field(
        True,
        description="A start finds the engine's process there, with its libraries imported and its device open. Off: it begins with a "
        "new process, as on a machine that keeps none; for measurements.",
    )
    start_prefetch: bool = Field(
        True,
        description="Parameters come to the node while its worker gets ready for them. Off, set on loader and workers: not before the "
        "engine's process is there; for measurements.",
    )
    start_stream: bool = Field(
        True,
        description="Each part of a model is loaded as soon as it is on the node. Off: none before all of them are; for measurements.",
    )
    start_overlap: bool = Field(
        True,
        description="Prompts run through the layers that are in place while others come, and stages of a group are joined meanwhile. "
        "Off: not before everything is in place; for measurements.",
    )
    hang_after_s: float = Field(
        8.0,
        gt=0,
        description="An engine that has come to nothing for this long may hang, and is ended if steps like its own usually take less than "
        "a tenth of that, or if it is stopped. Its requests go on elsewhere.",
    )
    loader_grace_s: float = Field(
        60.0, gt=0, description="A worker whose loader is gone for this long ends itself, in order."
    )
    sim_load_bytes_per_s: float = Field(
        8e9, gt=0, description="Simulated worker: bytes loaded per second."
    )
    sim_prefill_tokens_per_s: float = Field(
        20_000.0, gt=0, description="Simulated worker: prompt tokens per second."
    )
    sim_decode_step_s: float = Field(
        0.005, ge=0, description="Simulated worker: seconds that a step takes."
    )
    sim_requests_per_step: int = Field(
        64, ge=1, description="Simulated worker: requests that advance in one step; others wait."
    )

    @property
    def with_ranges(self) -> bool:
        """Artifacts that have graphs are to have those of ranges of layers."""
        given = self.materialize_ranges
        return self.max_stages > 1 if given is None else given

    @model_validator(mode="after")
    def _launches_what_it_restores(self) -> Self:
        if self.launch_lists and (self.graph_pointers, self.graph_kernels) != (
            "addresses",
            "images",
        ):
            raise ValueError(
                "launch_lists goes with graph_pointers=addresses and graph_kernels=images alone: leave one of them out"
            )
        return self
