# decoder, front and engine. Build from the repository's root:
#   docker build -f deploy/docker/decoder.Dockerfile -t hotset-decoder .
# For GPUs: --build-arg EXTRAS="decoder gpu". CUDA's libraries come with torch, the driver from the host; no compiler.
# BASE_IMAGE: Debian or Ubuntu with Python 3.11 to 3.13 of its own or from its packages, so also a CUDA runtime.
# TORCH: what pip is given for torch, the lock's version or options that choose a build of it.
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS base
# The version is the base image's to choose, like the rest of its system.
# hadolint ignore=DL3008
RUN command -v python3 || { apt-get update \
 && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; }

# An environment with what is needed, then the wheel in it: a change of the sources leaves the first layer as it is.
FROM base AS build
ARG EXTRAS=decoder
ARG TORCH=torch==2.13.0
WORKDIR /source
COPY pyproject.toml deploy/docker/requirements.py deploy/docker/lock.txt ./
RUN python3 requirements.py ${EXTRAS} > wanted.txt \
 && python3 requirements.py build > tools.txt \
 && python3 -m venv /opt/hotset && python3 -m venv /opt/tools \
 && /opt/hotset/bin/pip install --no-cache-dir --constraint lock.txt ${TORCH} --requirement wanted.txt \
 && /opt/tools/bin/pip install --no-cache-dir --constraint lock.txt --requirement tools.txt
COPY README.md ./
COPY proto proto
COPY services services
RUN PATH=/opt/tools/bin:$PATH pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /built . \
 && /opt/hotset/bin/pip install --no-cache-dir --no-deps /built/*.whl \
 && /opt/hotset/bin/pip check

FROM base
# The same number as kvstore's: both write in the arena's directory.
RUN groupadd --gid 10001 hotset && useradd --uid 10001 --gid 10001 --no-create-home hotset \
 && mkdir /cache && chown hotset:hotset /cache
COPY --from=build /opt/hotset /opt/hotset
COPY deploy/docker/decoder-entrypoint.sh /usr/local/bin/
ENV PATH=/opt/hotset/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/cache HOME=/tmp \
    HOTSET_HOST=0.0.0.0 HOTSET_PORT=8000
USER 10001:10001
EXPOSE 8000
# A checkpoint may take minutes to load; until /ready says yes, nothing is sent here.
HEALTHCHECK --interval=5s --timeout=3s --start-period=900s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
ENTRYPOINT ["decoder-entrypoint.sh"]
