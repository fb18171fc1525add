# `make image`: this program in /loft, for `launch.image=` and `docker run --gpus all`.
# `make image TARGET=cpu` leaves CUDA out. PyTorch's wheels bring CUDA; the driver is the host's.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE} AS base
ARG VERSION=unknown
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="loft" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}"
# Triton compiles the launchers of its kernels when they are first used. No pins: Debian drops a
# package's version when it mends it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 loft \
    && install --directory --owner=loft /loft /shared
# A number, by which Kubernetes sees that it is not root (runAsNonRoot).
USER 1000
WORKDIR /loft
RUN python3 -m venv .venv
COPY --chown=loft . .
ENV PATH=/loft/.venv/bin:$PATH PYTHONDONTWRITEBYTECODE=
HEALTHCHECK --interval=5m --timeout=2m CMD ["loft", "doctor"]
CMD ["loft", "--help"]

FROM base AS cpu
RUN python -m pip install --no-cache-dir --quiet --disable-pip-version-check \
        --constraint constraints.txt \
        --index-url "$(python -c 'from app.process.gpus import WHEELS; print(WHEELS)')/cpu" torch \
    && python -m pip install --no-cache-dir --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[remote,serve,eval]"

FROM base AS gpu
ARG EXTRAS=gpu,hybrid,flash4,deepspeed,remote,serve,eval
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN python -m pip install --no-cache-dir --quiet --disable-pip-version-check \
        --constraint constraints.txt torch \
    && python -m pip install --no-cache-dir --quiet --disable-pip-version-check \
        --constraint constraints.txt --editable ".[${EXTRAS}]"
