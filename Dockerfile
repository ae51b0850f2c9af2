# Two images from one file:
#
#   docker build --target router -t pdserve-router:0.1.0 .    # neither torch nor ray
#   docker build --target worker -t pdserve-worker:0.1.0 .    # worker, Ray's head, controller
#
# PIP_ARGS gives pip more arguments, for example an index with CPU builds of torch: without it the
# worker image carries CUDA.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
ARG PIP_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/pdserve
WORKDIR /src
COPY . .

FROM build AS build-router
RUN /opt/pdserve/bin/pip install ${PIP_ARGS} .

FROM build AS build-worker
# Ray's default extra holds the autoscaler that the KubeRay operator starts from this image.
RUN /opt/pdserve/bin/pip install ${PIP_ARGS} ".[worker]" "ray[default]"

FROM python:${PYTHON}-slim AS runtime
RUN useradd --uid 10001 --user-group --home-dir /var/lib/pdserve --create-home pdserve
# All that is written goes to /tmp, /dev/shm and the home folder; the rest may be read-only.
ENV PATH=/opt/pdserve/bin:$PATH HOME=/var/lib/pdserve \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0
WORKDIR /var/lib/pdserve
USER 10001:10001

FROM runtime AS router
COPY --from=build-router /opt/pdserve /opt/pdserve
EXPOSE 8000 8001
ENTRYPOINT []
CMD ["python", "-m", "router", "--help"]

FROM runtime AS worker
COPY --from=build-worker /opt/pdserve /opt/pdserve
ENTRYPOINT []
CMD ["pdserve", "--help"]
