# The pipeline with everything in requirements.lock, for NVIDIA GPUs; it runs on a CPU as well.
#
#   docker build --tag pipeline .
#   docker build --tag pipeline:cpu --build-arg BASE=ubuntu:24.04 .     without NVIDIA's base, for a CPU
#
# The CUDA libraries, cuDNN and NCCL come with the locked torch, so the base brings the system alone and the driver comes
# from the host. A base needs apt-get and a python3 of 3.11 to 3.13. torch always is the locked one, in a venv: a torch
# that a base has, as nvcr.io/nvidia/pytorch does, stays there and is not used; its settings are undone below.
#
# To pin the base: --build-arg BASE=nvidia/cuda@sha256:..., with the digest that
# `docker buildx imagetools inspect nvidia/cuda:13.2.1-base-ubuntu24.04` prints.
ARG BASE=nvidia/cuda:13.2.1-base-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE}

# Distributions keep no old versions of their packages to pin; pin the base instead.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates git python3 python3-venv tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log \
    && git config --system --add safe.directory '*'

# NVIDIA's PyTorch image holds pip to its own versions, and the loader to its own libtorch; the driver's stay.
ENV PIP_CONSTRAINT="" \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64

# Where packages come from a mirror, or by way of a certificate authority of your own:
# docker build --secret id=pip.conf,src=/etc/pip.conf --secret id=ca.crt,src=/etc/ssl/my-ca.crt; nothing of it stays in
# the image. Keep such files outside of the checkout; .dockerignore lets in only what it names.
COPY requirements-build.lock requirements.lock /opt/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    if [ -e /run/secrets/ca.crt ]; then export PIP_CERT=/run/secrets/ca.crt; fi \
    && python3 -m venv /opt/venv \
    && for lock in requirements-build requirements; do \
        /opt/venv/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --require-hashes \
            --no-build-isolation --requirement "/opt/$lock.lock" || exit 1; \
    done

# Any other user can be chosen at run time too (--user): the home directory is everybody's, and names are given.
ARG UID=1000
ARG GID=1000
RUN if getent passwd ubuntu; then userdel --remove ubuntu; fi \
    && groupadd --force --non-unique --gid "${GID}" pipeline \
    && useradd --no-log-init --non-unique --uid "${UID}" --gid "${GID}" --create-home pipeline \
    && chmod 1777 /home/pipeline
# NVIDIA's base asks the driver for its own minor version of CUDA, or the container is refused. torch needs the major
# version alone, and where that is missing, `doctor` says so.
ARG BASE
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/home/pipeline \
    USER=pipeline \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_DISABLE_REQUIRE=true \
    PIPELINE_IMAGE=${BASE}

# A checkout is mounted over this copy of the code. The copy has no git history, so DVC is told to do without.
WORKDIR /workspace
COPY --chown=${UID}:${GID} . .
RUN printf '[core]\n    no_scm = true\n' > .dvc/config.local && chown "${UID}:${GID}" . .dvc .dvc/config.local
USER ${UID}:${GID}

# DVC ignores SIGINT while a stage runs, but a SIGTERM would end it before its stage could save anything. tini passes
# the signal on to both: the training saves a checkpoint and ends, then DVC does.
STOPSIGNAL SIGINT
ENTRYPOINT ["tini", "-s", "-g", "--"]
CMD ["dvc", "repro"]

ARG REVISION=unknown
ARG SOURCE=unknown
ARG VERSION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="pipeline" \
    org.opencontainers.image.description="Which PyTorch technique pays on your model, data and machine" \
    org.opencontainers.image.base.name="${BASE}" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.source="${SOURCE}" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.created="${CREATED}"
