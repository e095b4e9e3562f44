# One recipe for every image:
#   docker build --build-arg SERVICE=gateway .        setup, gateway, scheduler, cache, materializer or node
#   docker build --build-arg SERVICE=node --build-context wheels=FOLDER .
# With a folder of wheels, what is there (torch, for example) is taken from it, else from the index.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM scratch AS wheels
# Stands for the build context of that name where none is given.
COPY deploy/wheels /

# Requirements alone, so that the packages' layer stays while only sources change.
FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /context
COPY constraints.txt ./
COPY tools/image_requirements.py tools/
COPY libs libs
COPY services services
RUN find libs services -type f ! -name pyproject.toml -delete && find libs services -type d -empty -delete

FROM ${PYTHON_IMAGE} AS build
ARG SERVICE
# Where packages come from, when not from PyPI; which build of torch the index gives: cpu, cu130, ... (empty: the index's own).
ARG PIP_INDEX_URL=
ARG TORCH_BACKEND=cpu
ENV PIP_CACHE_DIR=/var/cache/pip UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON=/opt/pilotlight/bin/python
WORKDIR /src
COPY --from=requirements /context ./
RUN --mount=type=cache,target=/var/cache/pip \
    pip install --quiet --disable-pip-version-check --root-user-action=ignore "$(grep '^uv==' constraints.txt)"
RUN --mount=type=cache,target=/var/cache/uv --mount=type=bind,from=wheels,target=/wheels \
    python tools/image_requirements.py packages "${SERVICE}" >/tmp/packages.txt \
 && python -m venv --without-pip /opt/pilotlight \
 && if [ -n "${PIP_INDEX_URL}" ]; then export UV_DEFAULT_INDEX="${PIP_INDEX_URL}"; fi \
 && if ! ls /wheels/torch-*.whl >/dev/null 2>&1 && [ -n "${TORCH_BACKEND}" ]; then export UV_TORCH_BACKEND="${TORCH_BACKEND}"; fi \
 && uv pip install --quiet -c constraints.txt --find-links /wheels -r /tmp/packages.txt
COPY libs libs
COPY services services
COPY migrations /tmp/migrations
RUN --mount=type=cache,target=/var/cache/uv \
    if [ -n "${PIP_INDEX_URL}" ]; then export UV_DEFAULT_INDEX="${PIP_INDEX_URL}"; fi \
 && python tools/image_requirements.py members "${SERVICE}" | xargs uv pip install --quiet --no-deps \
 && if [ "${SERVICE}" = setup ]; then cp -r /tmp/migrations /opt/pilotlight/ && chmod -R a+rX /opt/pilotlight/migrations; fi
# Whatever the modes of the checkout: one that was made with umask 077 has files that only its owner reads.
COPY --chmod=0755 deploy/image /opt/pilotlight/bin/

FROM ${PYTHON_IMAGE}
ARG SERVICE
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends tini && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 pilotlight && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin pilotlight \
 && install -d -o 10001 -g 10001 -m 0750 /run/pilotlight /run/pilotlight-secrets /var/lib/pilotlight \
 # A new volume takes owner and mode of the folder that it is first mounted on: `setup` comes first, and mounts them all.
 && if [ "${SERVICE}" = setup ]; then \
      for name in all gateway scheduler cache materializer node migrations nats postgres s3 grafana; do \
        install -d -o 10001 -g 10001 -m 0750 "/volumes/secrets/${name}"; done; \
      for name in nats s3 spans; do install -d -o 10001 -g 10001 -m 0750 "/volumes/data/${name}"; done; \
    fi
COPY --from=build /opt/pilotlight /opt/pilotlight
ENV PILOTLIGHT_SERVICE=${SERVICE} PATH=/opt/pilotlight/bin:$PATH PYTHONUNBUFFERED=1 \
    PILOTLIGHT_STATE_DIR=/var/lib/pilotlight PILOTLIGHT_LOG_DIR=- \
    PILOTLIGHT_SECRETS_DIR=/run/pilotlight-secrets PILOTLIGHT_MIGRATIONS_DIR=/opt/pilotlight/migrations
WORKDIR /var/lib/pilotlight
USER 10001:10001
ENTRYPOINT ["tini", "--", "serve"]
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --start-interval=1s --retries=3 CMD ["healthy"]
