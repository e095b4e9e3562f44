"""What others need to bring one file of parameters into memory.

Imports nothing of Pilotlight: the interpreter that has them runs it.

``python fetch_peers.py NAME PLACE``, where PLACE is a path or ``s3://bucket/key``; prints
``{"seconds", "cpu_s"}`` of the transfer alone. Endpoint and credentials are in the environment
(AWS_ENDPOINT_URL and what goes with it). ``python fetch_peers.py versions`` says whom one measures.

It is made with ``python3 -m venv peers && peers/bin/pip install boto3 awscli
'runai-model-streamer[s3]'``.
"""

import io
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path


def boto3(place: str) -> Callable[[], int]:
    """boto3's own transfer manager, with its defaults, into a buffer."""
    import boto3
    from botocore.config import Config

    bucket, key = place.removeprefix("s3://").split("/", 1)
    client = boto3.client("s3", config=Config(s3={"addressing_style": "path"}))

    def run() -> int:
        buffer = io.BytesIO()
        client.download_fileobj(bucket, key, buffer)
        return buffer.getbuffer().nbytes

    return run


def runai(place: str) -> Callable[[], int]:
    """runai-model-streamer, with its defaults, tensor by tensor."""
    from runai_model_streamer import SafetensorsStreamer

    def run() -> int:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(place)
            return sum(
                tensor.numel() * tensor.element_size() for _, tensor in streamer.get_tensors()
            )

    return run


def aws(place: str) -> Callable[[], int]:
    """``aws s3 cp`` into shared memory: the whole command, its start included."""
    target = Path(f"/dev/shm/pilotlight-bench-{os.getpid()}")

    def run() -> int:
        try:
            command = [
                sys.executable,
                "-m",
                "awscli",
                "s3",
                "cp",
                "--only-show-errors",
                place,
                str(target),
            ]
            subprocess.run(command, check=True, timeout=300)
            return target.stat().st_size
        finally:
            target.unlink(missing_ok=True)

    return run


def cp(place: str) -> Callable[[], int]:
    """``cp`` into shared memory."""
    target = Path(f"/dev/shm/pilotlight-bench-{os.getpid()}")

    def run() -> int:
        try:
            subprocess.run(["cp", place, str(target)], check=True, timeout=300)
            return target.stat().st_size
        finally:
            target.unlink(missing_ok=True)

    return run


PACKAGES = ("boto3", "awscli", "runai-model-streamer", "runai-model-streamer-s3", "torch")
CONTENDERS = {"boto3": boto3, "runai": runai, "aws": aws, "cp": cp}


def cpu_s() -> float:
    """Processor time of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> None:
    """Time one transfer."""
    if sys.argv[1:] == ["versions"]:
        print(json.dumps({name: metadata.version(name) for name in PACKAGES}))
        return
    name, place = sys.argv[1:]
    run = CONTENDERS[name](place)
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    size_bytes = run()
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - began_s,
                "cpu_s": cpu_s() - began_cpu_s,
                "bytes": size_bytes,
            }
        )
    )


if __name__ == "__main__":
    main()
