# The pipeline with all packages of requirements.lock, for NVIDIA GPUs. The image also runs on a CPU.
#
#   docker build --tag pipeline .
#   docker build --tag pipeline:cpu --build-arg BASE=ubuntu:24.04 .     without NVIDIA's base, for a CPU
#
# The CUDA libraries, cuDNN and NCCL come with the locked torch, and the driver comes from the host, so the base is only the
# operating system. A base needs apt-get and a python3 of 3.11 to 3.13. The locked torch is installed into a venv and always
# used. A torch of the base (nvcr.io/nvidia/pytorch has one) stays unused; its settings are undone below.
#
# To pin the base: --build-arg BASE=nvidia/cuda@sha256:..., with the digest that
# `docker buildx imagetools inspect nvidia/cuda:13.2.1-base-ubuntu24.04` prints.
ARG BASE=nvidia/cuda:13.2.1-base-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE}

# Package versions are not pinned, because distributions delete old versions; pin the base instead.
# A base may name sources by https, as NVIDIA's does: see ca.crt below. apt reads it as a user of its own.
# hadolint ignore=DL3008
RUN --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt,mode=0444 \
    if [ -e /run/secrets/ca.crt ]; then set -- --option Acquire::https::CAInfo=/run/secrets/ca.crt; fi \
    && apt-get "$@" update \
    && DEBIAN_FRONTEND=noninteractive apt-get "$@" install --yes --no-install-recommends \
        ca-certificates git python3 python3-venv tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log \
    && git config --system --add safe.directory '*'

# NVIDIA's PyTorch image makes pip keep the image's versions, and the loader use the image's libtorch. This undoes both; the
# driver's libraries stay.
ENV PIP_CONSTRAINT="" \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64

# For a mirror of the package index, or a certificate authority of your own:
# docker build --secret id=pip.conf,src=/etc/pip.conf --secret id=ca.crt,src=/etc/ssl/my-ca.crt
# Nothing of these files stays in the image. Keep such files outside of the checkout.
COPY requirements-build.lock requirements.lock /opt/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=ca.crt,target=/run/secrets/ca.crt \
    if [ -e /run/secrets/ca.crt ]; then export PIP_CERT=/run/secrets/ca.crt; fi \
    && python3 -m venv /opt/venv \
    && for lock in requirements-build requirements; do \
        /opt/venv/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --require-hashes \
            --no-build-isolation --requirement "/opt/$lock.lock" || exit 1; \
    done

# --user can choose any other user at run time: everybody can write to the home directory, and HOME and USER are set below.
ARG UID=1000
ARG GID=1000
RUN if getent passwd ubuntu; then userdel --remove ubuntu; fi \
    && groupadd --force --non-unique --gid "${GID}" pipeline \
    && useradd --no-log-init --non-unique --uid "${UID}" --gid "${GID}" --create-home pipeline \
    && chmod 1777 /home/pipeline
# NVIDIA's base refuses to start if the driver lacks the base's minor version of CUDA. torch needs only the major version, so
# the check is off (NVIDIA_DISABLE_REQUIRE); `doctor` says if the major version is missing.
ARG BASE
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/home/pipeline \
    USER=pipeline \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_DISABLE_REQUIRE=true \
    PIPELINE_IMAGE=${BASE}

# This copy of the code runs if no checkout is mounted. The copy has no git history, so DVC is told to work without git.
WORKDIR /workspace
COPY --chown=${UID}:${GID} . .
RUN printf '[core]\n    no_scm = true\n' > .dvc/config.local && chown "${UID}:${GID}" . .dvc .dvc/config.local
USER ${UID}:${GID}

# The stop signal is SIGINT: DVC ignores it while a stage runs, but SIGTERM would end DVC before its stage saves anything.
# tini sends the signal to DVC and to the stage: the training saves a checkpoint and ends, and then DVC ends.
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
