"""A checkpoint, read: what registration needs to know, from small files and headers alone."""

from collections.abc import Collection
from dataclasses import dataclass

from pilotlight.checkpoint.config import declared_dtype, parse_config
from pilotlight.checkpoint.errors import BadCheckpoint, UnsupportedModel
from pilotlight.checkpoint.generation import GENERATION_FILE, GenerationDefaults, parse_generation
from pilotlight.checkpoint.layout import build_manifest, stored_dtype, stored_scale_dtype
from pilotlight.checkpoint.manifest import Chunk, Manifest
from pilotlight.checkpoint.pooling import read_pooling_files
from pilotlight.checkpoint.reader import Source, SourceFile, read_small, source_version
from pilotlight.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, read_tensors
from pilotlight.checkpoint.strict_json import CONFIG_FILE, MAX_CONFIG_BYTES, JsonObject
from pilotlight.policy.model import Dtype, ModelSpec

ADAPTER_FILE = "adapter_config.json"
TEXT_FILES = (
    CONFIG_FILE,
    GENERATION_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Files that a text bundle is made from, where present."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What there is to know of a checkpoint before a single weight is read."""

    spec: ModelSpec
    manifest: Manifest
    source_version: str
    """Changes when any of the files that were looked at changes."""
    run_dtype: Dtype
    """What ``auto`` means: the configuration's element type, else the stored one."""
    generation: GenerationDefaults
    text_files: tuple[SourceFile, ...]
    """Those of ``TEXT_FILES`` that are present."""


def read_checkpoint(source: Source) -> Checkpoint:
    """Read configuration and headers, and check that each fits the other.

    Raises:
        BadCheckpoint: files are missing, damaged or contradict each other; the message names file
            and fault.
        UnsupportedModel: a sound checkpoint of a kind that cannot be served.
        SourceUnavailable, SourceChanged: the files cannot be read, or changed meanwhile.
    """
    files = {file.name: file for file in source.list_files()}
    if CONFIG_FILE not in files or not (SINGLE_FILE in files or INDEX_FILE in files):
        _refuse_other_kinds(files)
    if CONFIG_FILE not in files:
        raise BadCheckpoint(
            f"there is no {CONFIG_FILE}: a model is a folder with {CONFIG_FILE}, tokenizer.json and safetensors files"
        )
    config = read_small(source, files[CONFIG_FILE], MAX_CONFIG_BYTES)
    tensors = read_tensors(source, files)
    stored = stored_dtype(tensors)
    said = read_pooling_files(source, files)
    spec = parse_config(config, stored, stored_scale_dtype(tensors), said=said, names=tensors)
    manifest = build_manifest(spec, files.values(), tensors)
    text_files = tuple(files[name] for name in TEXT_FILES if name in files)
    looked_at = {file.name: file for file in (*manifest.files, *text_files)}
    looked_at |= {name: files[name] for name in said}
    if INDEX_FILE in files:
        looked_at[INDEX_FILE] = files[INDEX_FILE]
    return Checkpoint(
        spec=spec,
        manifest=manifest,
        source_version=source_version(looked_at.values()),
        run_dtype=declared_dtype(config) or stored,
        generation=_read_generation(source, files, config),
        text_files=text_files,
    )


def read_chunk(source: Source, manifest: Manifest, chunk: Chunk) -> bytes:
    """A chunk's image bytes, padding included; ``bytes_digest`` of them is the chunk's digest.

    Raises:
        SourceUnavailable, SourceChanged: the files cannot be read, or are not those of the
            manifest.
    """
    image = bytearray(chunk.size_bytes)
    for segment in chunk.segments:
        start = segment.image_offset - chunk.image_offset
        data = source.read(manifest.files[segment.file], segment.file_offset, segment.size_bytes)
        image[start : start + segment.size_bytes] = data
    return bytes(image)


def _refuse_other_kinds(files: Collection[str]) -> None:
    """What people have beside checkpoints, and take for one."""
    if ADAPTER_FILE in files:
        raise UnsupportedModel(
            "is a LoRA adapter, which is not served: merge it into its base model (merge_and_unload in peft), and register what that saves",
            file=ADAPTER_FILE,
        )
    converted = sorted(name for name in files if name.lower().endswith(".gguf"))
    if converted:
        raise UnsupportedModel(
            "GGUF files are not served: register the safetensors checkpoint that it was converted from",
            file=converted[0],
        )


def _read_generation(
    source: Source, files: dict[str, SourceFile], config: bytes
) -> GenerationDefaults:
    generation: JsonObject | None = None
    if GENERATION_FILE in files:
        generation = JsonObject.parse(
            read_small(source, files[GENERATION_FILE], MAX_CONFIG_BYTES), GENERATION_FILE
        )
    return parse_generation(generation, JsonObject.parse(config, CONFIG_FILE))
