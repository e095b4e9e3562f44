"""Whether services on this machine can work: ``python -m pilotlight.common.probe scheduler``, a
container's health check.

Asks ``/readyz`` on the Unix sockets of the run folder. It is started every few seconds, so it
imports the standard library alone.
"""

import os
import socket
import sys
from pathlib import Path

DEADLINE_S = 3.0
MAX_ANSWER_BYTES = 64 * 1024
_REQUEST = b"GET /readyz HTTP/1.1\r\nHost: local\r\nConnection: close\r\n\r\n"


def not_ready(run_dir: Path, service: str) -> str | None:
    """Why no process of a service can work, or None when one can."""
    reasons = [_ask(path) for path in sorted(run_dir.glob(f"{service}-*.sock"))]
    if None in reasons:
        return None
    return f"{service}: " + (
        "; ".join(reason for reason in reasons if reason) or "it has not started"
    )


def _ask(path: Path) -> str | None:
    answer = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(DEADLINE_S)
            connection.connect(str(path))
            connection.sendall(_REQUEST)
            while len(answer) < MAX_ANSWER_BYTES and (more := connection.recv(MAX_ANSWER_BYTES)):
                answer += more
    except OSError as error:
        # A socket outlives a process that was killed.
        return f"{path.name} does not answer ({error})"
    head, _, body = answer.partition(b"\r\n\r\n")
    return (
        None
        if b" 200 " in head.partition(b"\r\n")[0]
        else body.decode(errors="replace").strip() or "no answer"
    )


def main() -> int:
    """Ask for each service named; 0 when all can work, 1 when one cannot."""
    run_dir = Path(os.environ.get("PILOTLIGHT_RUN_DIR", ".pilotlight/run"))
    reasons = [
        reason for service in sys.argv[1:] if (reason := not_ready(run_dir, service)) is not None
    ]
    sys.stdout.write("\n".join(reasons or ["ready"]) + "\n")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
