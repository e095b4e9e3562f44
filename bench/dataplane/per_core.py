"""What a byte from S3 costs one core, step by step: receive, decrypt, HTTP, hash, place. As JSON.

Everything is on this machine, the other end of each step in a thread whose time does not count.
What a network card's driver takes is not in it, and the loopback's ``receive`` is cheaper than a
card's where packets are small.
"""

import argparse
import http.client
import json
import mmap
import os
import socket
import ssl
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bare_loader import MIB, machine

from pilotlight.dataplane.file_reads import native_reads
from pilotlight.native.reads import blake3_of

BYTES_PER_S = 100e9 / 8
RECORDS_BYTES = 16 * MIB


def receive(size_bytes: int) -> float:
    """``recv_into`` of a megabyte from a TCP connection; seconds of processor."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        accepted, _ = server.accept()

        def send() -> None:
            data = bytes(MIB)
            for _ in range(size_bytes // MIB):
                accepted.sendall(data)
            accepted.close()

        sender = threading.Thread(target=send)
        sender.start()
        buffer, began_s = memoryview(bytearray(MIB)), time.thread_time()
        while client.recv_into(buffer):
            pass
        used_s = time.thread_time() - began_s
        sender.join()
        return used_s


def decrypt(size_bytes: int, cipher: str) -> float:
    """TLS 1.2 records of one cipher, decrypted by OpenSSL from memory to memory; seconds of
    processor.
    """
    with tempfile.TemporaryDirectory() as folder:
        key, certificate = Path(folder) / "key", Path(folder) / "certificate"
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
        command += f" -keyout {key} -out {certificate}"
        subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
        giver, taker = (
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )
        giver.load_cert_chain(certificate, key)
    taker.check_hostname, taker.verify_mode = False, ssl.CERT_NONE
    for context in (giver, taker):
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(cipher)
    down, up = ssl.MemoryBIO(), ssl.MemoryBIO()
    server, client = giver.wrap_bio(up, down, server_side=True), taker.wrap_bio(down, up)
    ends, at = [client, server], 0
    while ends:
        end = ends[at % len(ends)]
        try:
            end.do_handshake()
            ends.remove(end)
        except ssl.SSLWantReadError:
            at += 1
    used_s, buffer, data = 0.0, memoryview(bytearray(MIB)), bytes(RECORDS_BYTES)
    for _ in range(max(1, size_bytes // RECORDS_BYTES)):
        server.write(data)
        left, began_s = RECORDS_BYTES, time.thread_time()
        while left:
            left -= client.read(MIB, buffer)
        used_s += time.thread_time() - began_s
    return used_s


def read_http(size_bytes: int) -> float:
    """Ranges of 8 MiB by ``http.client`` into a buffer, without TLS; seconds of processor,
    receiving among them.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            accepted, _ = server.accept()
            with accepted, accepted.makefile("rb") as asked:
                body = bytes(8 * MIB)
                while asked.readline().startswith(b"GET"):
                    while asked.readline().strip():
                        pass
                    accepted.sendall(
                        b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\n\r\n" % len(body)
                        + body
                    )

        server_thread = threading.Thread(target=serve, daemon=True)
        server_thread.start()
        client = http.client.HTTPConnection(*server.getsockname())
        buffer, began_s = memoryview(bytearray(MIB)), time.thread_time()
        for _ in range(size_bytes // (8 * MIB)):
            client.request("GET", "/model", headers={"Range": "bytes=0-8388607"})
            answer = client.getresponse()
            while answer.readinto(buffer):
                pass
        used_s = time.thread_time() - began_s
        client.close()
        return used_s


def hash_units(size_bytes: int) -> float:
    """BLAKE3 of units of a megabyte, by the library; seconds of processor."""
    library = native_reads()
    if library is None:
        raise SystemExit("there is no library")
    unit, began_s = os.urandom(MIB), time.thread_time()
    for _ in range(size_bytes // MIB):
        blake3_of(library, unit)
    return time.thread_time() - began_s


def place(size_bytes: int) -> float:
    """Copies of a megabyte that a core has into memory that is backed; seconds of processor."""
    with mmap.mmap(-1, 256 * MIB) as memory:
        memory.write(bytes(256 * MIB))
        data, began_s = bytes(MIB), time.thread_time()
        for number in range(size_bytes // MIB):
            at = number % 256 * MIB
            memory[at : at + MIB] = data
        return time.thread_time() - began_s


STEPS: dict[str, Callable[[int], float]] = {
    "receive, TCP": receive,
    "receive with HTTP, Python's http.client": read_http,
    "decrypt, AES-128-GCM": lambda size_bytes: decrypt(size_bytes, "ECDHE-RSA-AES128-GCM-SHA256"),
    "decrypt, AES-256-GCM": lambda size_bytes: decrypt(size_bytes, "ECDHE-RSA-AES256-GCM-SHA384"),
    "decrypt, ChaCha20-Poly1305": lambda size_bytes: decrypt(
        size_bytes, "ECDHE-RSA-CHACHA20-POLY1305"
    ),
    "hash, BLAKE3": hash_units,
    "place": place,
}


def main() -> None:
    """Measure every step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="bytes of each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    steps: dict[str, dict[str, float]] = {}
    for name, step in STEPS.items():
        rounds = [step(options.mib * MIB) * 1024 / options.mib for _ in range(options.rounds)]
        cpu_s_per_gib = statistics.median(rounds)
        cores = BYTES_PER_S / 2**30 * cpu_s_per_gib
        steps[name] = {
            "cpu_s_per_gib": round(cpu_s_per_gib, 3),
            "cores_at_100_gbit": round(cores, 1),
        }
    print(
        json.dumps({"machine": machine(), "openssl": ssl.OPENSSL_VERSION, "steps": steps}, indent=2)
    )


if __name__ == "__main__":
    main()
