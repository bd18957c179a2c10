# Tunedeck in a container, for one machine's GPUs: docker build -t tunedeck .
# Run: docker run --gpus all --ipc host -it -v tunedeck:/workspace tunedeck
FROM nvidia/cuda:12.8.1-base-ubuntu24.04

# gcc: triton compiles a small file for each kernel's launch. tmux: runs outlive terminals, terminals outlive connections.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev less openssh-client python3-dev python3-venv tini tmux \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/tunedeck
ENV PATH=/opt/tunedeck/bin:$PATH
COPY . /opt/source
# Of a checkout: what is installed is its own wheel. Without --build-arg VERSION=0.2.0 it is a development version.
ARG VERSION=
# hadolint ignore=DL3013
RUN SETUPTOOLS_SCM_PRETEND_VERSION_FOR_TUNEDECK=$VERSION \
    pip install --no-cache-dir '/opt/source[cuda,vision,track]' && rm -rf /opt/source

# The volume belongs to user 1000, who is nobody else in the image.
RUN mkdir -p /workspace && chown 1000:1000 /workspace
ENV HOME=/workspace \
    HF_HOME=/workspace/.cache/huggingface \
    TUNEDECK_RUNS=/workspace/runs \
    TUNEDECK_STATE=/workspace/.state \
    TUNEDECK_CACHE=/workspace/.cache/tunedeck \
    LANG=C.UTF-8
VOLUME /workspace
WORKDIR /workspace
USER 1000:1000

HEALTHCHECK --interval=5m --timeout=60s CMD ["tunedeck", "doctor", "--json"]
ENTRYPOINT ["tini", "--"]
CMD ["tmux", "new-session", "-A", "-s", "tunedeck", "tunedeck"]
