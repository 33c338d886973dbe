# kvstore: no torch, no GPU, no compiler. Build from the repository's root:
#   docker build -f deploy/docker/kvstore.Dockerfile -t hotset-kvstore .
# EXTRAS: `events` publishes KV events, `ucx` lets stores of several nodes fetch from one another: 200 MB more.
ARG BASE_IMAGE=python:3.12-slim-bookworm

# An environment with what is needed, then the wheel in it: a change of the sources leaves the first layer as it is.
FROM ${BASE_IMAGE} AS build
ARG EXTRAS=events
WORKDIR /source
COPY pyproject.toml deploy/docker/requirements.py deploy/docker/lock.txt ./
RUN python3 requirements.py ${EXTRAS} > wanted.txt \
 && python3 requirements.py build > tools.txt \
 && python3 -m venv /opt/hotset && python3 -m venv /opt/tools \
 && /opt/hotset/bin/pip install --no-cache-dir --constraint lock.txt --requirement wanted.txt \
 && /opt/tools/bin/pip install --no-cache-dir --constraint lock.txt --requirement tools.txt
COPY README.md ./
COPY proto proto
COPY services services
RUN PATH=/opt/tools/bin:$PATH pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /built . \
 && /opt/hotset/bin/pip install --no-cache-dir --no-deps /built/*.whl \
 && /opt/hotset/bin/pip check

FROM ${BASE_IMAGE}
# The decoder runs under the same number: both write in the arena's directory.
RUN groupadd --gid 10001 hotset && useradd --uid 10001 --gid 10001 --no-create-home hotset
COPY --from=build /opt/hotset /opt/hotset
ENV PATH=/opt/hotset/bin:$PATH PYTHONUNBUFFERED=1 \
    HOTSET_LISTEN=0.0.0.0:7700 HOTSET_METRICS_HOST=0.0.0.0 HOTSET_ARENA_DIR=/arena/hotset
USER 10001:10001
EXPOSE 7700 7701
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 CMD ["python", "-m", "services.kvstore.health"]
ENTRYPOINT ["python", "-m", "services.kvstore"]
