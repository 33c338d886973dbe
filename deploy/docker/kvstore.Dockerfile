# kvstore: no torch, no GPU, no compiler. Build from the repository's root:
#   docker build -f deploy/docker/kvstore.Dockerfile -t hotset-kvstore .
ARG PYTHON_IMAGE=python:3.12-slim

# The wheel, stubs included, and an environment that holds it with what kvstore needs.
FROM ${PYTHON_IMAGE} AS build
WORKDIR /source
COPY pyproject.toml README.md ./
COPY proto proto
COPY services services
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && python -m venv /opt/hotset \
 && /opt/hotset/bin/pip install --no-cache-dir /wheels/*.whl

FROM ${PYTHON_IMAGE}
# The decoder runs under the same number: both write in the arena's directory.
RUN groupadd --gid 10001 hotset && useradd --uid 10001 --gid 10001 --no-create-home hotset
COPY --from=build /opt/hotset /opt/hotset
ENV PATH=/opt/hotset/bin:$PATH PYTHONUNBUFFERED=1
USER hotset
EXPOSE 7700 7701
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import grpc; from grpc_health.v1 import health_pb2 as m, health_pb2_grpc as s; reply = s.HealthStub(grpc.insecure_channel('127.0.0.1:7700')).Check(m.HealthCheckRequest(), timeout=2); raise SystemExit(reply.status != m.HealthCheckResponse.SERVING)"]
ENTRYPOINT ["python", "-m", "services.kvstore"]
CMD ["--listen", "0.0.0.0:7700", "--metrics-host", "0.0.0.0", "--arena-dir", "/arena/hotset"]
