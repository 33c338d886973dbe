# decoder, front and engine, on the CPU. Build from the repository's root:
#   docker build -f deploy/docker/decoder.Dockerfile -t hotset-decoder .
# TORCH is what pip is given for torch: a version, or options that choose a build.
ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS build
ARG TORCH=torch==2.13.0
WORKDIR /source
COPY pyproject.toml README.md ./
COPY proto proto
COPY services services
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
 && python -m venv /opt/hotset \
 && /opt/hotset/bin/pip install --no-cache-dir ${TORCH} "$(ls /wheels/*.whl)[decoder]"

FROM ${PYTHON_IMAGE}
# The same number as kvstore's: both write in the arena's directory.
RUN groupadd --gid 10001 hotset && useradd --uid 10001 --gid 10001 --no-create-home hotset \
 && mkdir /cache && chown hotset:hotset /cache
COPY --from=build /opt/hotset /opt/hotset
COPY --chmod=755 deploy/docker/decoder-entrypoint.sh /usr/local/bin/
ENV PATH=/opt/hotset/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/cache HOME=/tmp
USER hotset
EXPOSE 8000
# A checkpoint may take minutes to load; until /ready says yes, nothing is sent here.
HEALTHCHECK --interval=5s --timeout=3s --start-period=900s --retries=3 \
  CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/ready', timeout=2)"]
ENTRYPOINT ["decoder-entrypoint.sh"]
CMD ["--host", "0.0.0.0", "--port", "8000"]
