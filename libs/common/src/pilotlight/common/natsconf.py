"""Rights to publish and subscribe on NATS: one user for each service, and the streams that they
share.

``python -m pilotlight.common.natsconf config`` prints a server configuration from the secrets
``nats-<user>``; ``python -m pilotlight.common.natsconf streams`` makes the streams and buckets, as
the user ``admin``.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import Field

from pilotlight.common.buckets import (
    COPIES,
    GATEWAYS,
    HEALTH,
    INSTANCES,
    LEADER,
    NODES,
    WORKERS,
)
from pilotlight.common.errors import PilotlightError
from pilotlight.common.messages import (
    arrivals,
    artifacts,
    demand,
    events,
    hold,
    limits,
    phases,
    reports,
    room,
    spans,
    tokens,
    verify,
)
from pilotlight.common.messages.codec import MAX_PAYLOAD_BYTES
from pilotlight.common.nats_bus import NatsBus, bucket_name
from pilotlight.common.nats_streams import EVENTS_KEPT_DAYS, ensure_bucket, ensure_events
from pilotlight.common.settings import BusSettings
from pilotlight.common.telemetry import configure_logging
from pilotlight.policy.ids import GatewayId, NodeId, WorkerId

log = structlog.get_logger()

SYSTEM = "system"
"""Of the server's own account, with the admin's password: may ask the server how it is."""
ADMIN = "admin"
"""May do everything; used to make streams and buckets, by no service."""
EVENTS_BYTES = 1 << 30
BUCKETS_BYTES = 256 << 20
"""Far beyond what the last values of all keys take."""
STORE_BYTES = 64 << 30
"""A limit, nothing is reserved. The server refuses to change a stream while all may take more than
this, also to make one smaller."""
MEMORY_BYTES = 64 << 20
"""For streams in memory: there are none, only what the server keeps of each watch."""
BUCKETS = (GATEWAYS, INSTANCES, COPIES, NODES, WORKERS, LEADER, HEALTH)


class StreamSettings(BusSettings):
    """How long the stream of events keeps them: whichever comes first.

    Set where streams are made, and by `pilotlight up`.
    """

    events_keep_days: float = Field(
        default=EVENTS_KEPT_DAYS, gt=0, description="Days for which events are kept."
    )
    events_bytes: int = Field(
        default=EVENTS_BYTES,
        ge=1 << 20,
        description="Bytes of events that are kept at most, the newest.",
    )
    nats_store_bytes: int = Field(
        default=STORE_BYTES,
        ge=1 << 20,
        description="Bytes that a NATS server which Pilotlight configures may store: a limit, whatever is free on its disk when it "
        "starts. Never less than events and last values may take.",
    )

    nats_replicas: int = Field(
        default=1,
        ge=1,
        le=5,
        description="On how many servers of a NATS cluster events and last values are kept: 3 in a cluster of three.",
    )

    @property
    def store_bytes(self) -> int:
        """What the server may store on its disk."""
        return max(self.nats_store_bytes, self.events_bytes + BUCKETS_BYTES)


_ANY_WORKER = WorkerId("*")
_ANY_NODE = NodeId("*")
_ANY_GATEWAY = GatewayId("*")
_REPORTS = (reports.WORKER_REPORTS, reports.LOADER_REPORTS, reports.NODE_REPORTS)
_WHOLE = reports.whole_subject(_ANY_NODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What one user may do.

    Every user may also publish its own events and spans, and answer requests.
    """

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    """Buckets that it writes: each has one writer."""
    read: tuple[str, ...] = ()
    """Buckets that it watches, or asks."""


RIGHTS: dict[str, Rights] = {
    "gateway": Rights(
        publish=(
            demand.demand_subject(_ANY_GATEWAY),
            arrivals.arrivals_subject(_ANY_GATEWAY),
            limits.limits_subject(_ANY_GATEWAY),
            demand.WARM_SUBJECT,
            demand.EVICT_SUBJECT,
            verify.verify_subject(_ANY_NODE),
            verify.verification_subject(_ANY_NODE),
            phases.PHASES_SUBJECT,
            artifacts.MATERIALIZE_SUBJECT,
            artifacts.ASK_MATERIALS_SUBJECT,
            tokens.submit_subject(_ANY_WORKER),
            tokens.cancel_subject(_ANY_WORKER),
            tokens.ack_subject(_ANY_WORKER),
            tokens.resend_subject(_ANY_WORKER),
            _WHOLE,
        ),
        subscribe=(
            tokens.tokens_subject(_ANY_GATEWAY),
            spans.SPANS_SUBJECT,
            events.GATEWAY_EVENTS,
            limits.LIMIT_SUBJECTS,
            demand.NEVER_FITS_SUBJECT,
            *_REPORTS,
        ),
        write=(GATEWAYS,),
        read=(INSTANCES, GATEWAYS),
    ),
    "scheduler": Rights(
        publish=(
            hold.worker_hold_subject(_ANY_WORKER),
            hold.node_hold_subject(_ANY_NODE),
            room.RESERVE_SUBJECT,
            room.RELEASE_SUBJECT,
            artifacts.FIND_ARTIFACTS_SUBJECT,
            reports.COALESCE_SUBJECT,
            demand.NEVER_FITS_SUBJECT,
            _WHOLE,
        ),
        subscribe=(
            demand.DEMAND_SUBJECTS,
            arrivals.ARRIVAL_SUBJECTS,
            demand.WARM_SUBJECT,
            demand.EVICT_SUBJECT,
            phases.PHASES_SUBJECT,
            events.GATEWAY_EVENTS,
            room.GRANT_SETTLED_SUBJECT,
            *_REPORTS,
        ),
        write=(INSTANCES, LEADER),
        read=(INSTANCES, LEADER, HEALTH),
    ),
    "cache": Rights(
        publish=(
            room.give_up_subject(_ANY_WORKER),
            room.lend_subject(_ANY_WORKER),
            room.drop_subject(_ANY_NODE),
            room.DISK_ORDER_SUBJECT,
            room.GRANT_SETTLED_SUBJECT,
            _WHOLE,
            hold.prefetch_subject(_ANY_NODE),
        ),
        subscribe=(
            room.RESERVE_SUBJECT,
            room.RELEASE_SUBJECT,
            arrivals.ARRIVAL_SUBJECTS,
            *_REPORTS,
        ),
        write=(COPIES,),
        read=(COPIES,),
    ),
    "loader": Rights(
        publish=(
            reports.loader_report_subject(_ANY_NODE),
            reports.node_report_subject(_ANY_NODE),
            phases.PHASES_SUBJECT,
        ),
        subscribe=(
            _WHOLE,
            reports.COALESCE_SUBJECT,
            hold.node_hold_subject(_ANY_NODE),
            hold.prefetch_subject(_ANY_NODE),
            room.drop_subject(_ANY_NODE),
            room.DISK_ORDER_SUBJECT,
            verify.verify_subject(_ANY_NODE),
            verify.verification_subject(_ANY_NODE),
        ),
        write=(NODES,),
        read=(LEADER, NODES),
    ),
    "worker": Rights(
        publish=(
            reports.worker_report_subject(_ANY_WORKER),
            tokens.tokens_subject(_ANY_GATEWAY),
            phases.PHASES_SUBJECT,
            artifacts.FIND_ARTIFACTS_SUBJECT,
            artifacts.PUBLISH_ARTIFACT_SUBJECT,
            artifacts.CLAIM_BUILD_SUBJECT,
            artifacts.REPORT_BUILD_SUBJECT,
            artifacts.END_BUILD_SUBJECT,
            artifacts.FINISH_BUILD_SUBJECT,
        ),
        subscribe=(
            artifacts.BUILD_WANTED_SUBJECT,
            hold.worker_hold_subject(_ANY_WORKER),
            room.give_up_subject(_ANY_WORKER),
            room.lend_subject(_ANY_WORKER),
            tokens.submit_subject(_ANY_WORKER),
            tokens.cancel_subject(_ANY_WORKER),
            tokens.ack_subject(_ANY_WORKER),
            tokens.resend_subject(_ANY_WORKER),
        ),
        write=(WORKERS,),
    ),
    "materializer": Rights(
        publish=(artifacts.BUILD_WANTED_SUBJECT,),
        subscribe=(
            artifacts.FIND_ARTIFACTS_SUBJECT,
            artifacts.PUBLISH_ARTIFACT_SUBJECT,
            artifacts.CLAIM_BUILD_SUBJECT,
            artifacts.REPORT_BUILD_SUBJECT,
            artifacts.END_BUILD_SUBJECT,
            artifacts.FINISH_BUILD_SUBJECT,
            artifacts.MATERIALIZE_SUBJECT,
            artifacts.ASK_MATERIALS_SUBJECT,
        ),
    ),
}
"""By user. What is not listed is refused by the server."""


def allowed_publish(user: str) -> tuple[str, ...]:
    """Every subject that a user may publish on, JetStream's own among them."""
    rights = RIGHTS[user]
    opened = dict.fromkeys((*rights.write, *rights.read, HEALTH))
    return (
        *rights.publish,
        events.event_subject(user, ">"),
        spans.SPANS_SUBJECT,
        f"$KV.{HEALTH}.{user}",
        *(f"$KV.{name}.>" for name in rights.write),
        *(f"$JS.API.STREAM.INFO.KV_{name}" for name in opened),
        *(f"$JS.API.CONSUMER.CREATE.KV_{name}" for name in rights.read),
        *(f"$JS.API.STREAM.MSG.GET.KV_{name}" for name in rights.read),
    )


def allowed_subscribe(user: str) -> tuple[str, ...]:
    """Every subject that a user may subscribe to: what is meant for it, and its own inbox."""
    return (*RIGHTS[user].subscribe, f"_INBOX.{user}.>")


def server_config(
    passwords: Mapping[str, str],
    *,
    store_bytes: int = STORE_BYTES,
    store_dir: Path | None = None,
    monitor: str = "",
) -> str:
    """The configuration of a nats-server: limits, JetStream, and one user for each password;
    without passwords, no authentication.

    The limits are fixed: without them the server takes what is free when it starts, and on a full
    disk that is nothing, for good. Address and port are given on the command line.

    Args:
        passwords: by user; empty: no authentication.
        store_bytes: what JetStream may store on disk at most.
        store_dir: where; None: the command line says so.
        monitor: address of its health and metrics; empty: there are none.
    """
    stored: dict[str, Any] = {"max_file_store": store_bytes, "max_memory_store": MEMORY_BYTES}
    if store_dir is not None:
        stored["store_dir"] = str(store_dir)
    config: dict[str, Any] = {
        "max_payload": MAX_PAYLOAD_BYTES,
        "max_pending": 8 * MAX_PAYLOAD_BYTES,
        "jetstream": stored,
    }
    if monitor:
        config["http"] = monitor
    if passwords:
        users = [_user(user, password) for user, password in passwords.items()]
        config["authorization"] = {"users": users}
    if ADMIN in passwords:
        config["accounts"] = {"$SYS": {"users": [{"user": SYSTEM, "password": passwords[ADMIN]}]}}
    # The server's own format is a superset of JSON.
    return json.dumps(config, indent=2) + "\n"


def _user(user: str, password: str) -> dict[str, Any]:
    if user == ADMIN:
        return {"user": user, "password": password}
    permissions = {
        "publish": {"allow": list(allowed_publish(user))},
        "subscribe": {"allow": list(allowed_subscribe(user))},
        # A service answers each request once.
        "allow_responses": {"max": 1, "expires": "2m"},
    }
    return {"user": user, "password": password, "permissions": permissions}


async def ensure_streams(settings: StreamSettings) -> None:
    """Make the stream of events and the buckets, or make them equal to this release's.

    Raises:
        BusUnavailable: the server cannot be reached, refuses the user ``admin``, or has no room for
            the stream.
    """
    bus = await NatsBus.connect(settings, user=ADMIN, name="streams")
    try:
        await ensure_events(
            bus.client,
            settings.prefix,
            settings.events_bytes,
            settings.events_keep_days,
            settings.nats_replicas,
        )
        for name in BUCKETS:
            await ensure_bucket(
                bus.client, bucket_name(settings.prefix, name), settings.nats_replicas
            )
    finally:
        await bus.close()


def main() -> int:
    """Print a server's configuration, or make the streams; the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pilotlight.common.natsconf", description="NATS users and streams."
    )
    parser.add_argument("what", choices=["config", "streams"])
    what = parser.parse_args().what
    configure_logging("natsconf")
    try:
        settings = StreamSettings()
        if what == "streams":
            asyncio.run(ensure_streams(settings))
        else:
            found = {user: settings.password_of(user) for user in (ADMIN, *RIGHTS)}
            passwords = {user: password for user, password in found.items() if password}
            sys.stdout.write(server_config(passwords, store_bytes=settings.store_bytes))
    except (PilotlightError, ValueError) as error:
        log.error("cannot configure NATS", action="natsconf_failed", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
