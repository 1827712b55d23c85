# syntax=docker/dockerfile:1
# Fovea on NVIDIA GPUs with the embedded engine. From the root of a checkout:
#   docker build -f docker/cuda.Dockerfile -t fovea:cuda .
# torch's wheels hold CUDA's libraries; the driver comes from the host, by NVIDIA's container toolkit.
FROM python:3.12-slim-bookworm

ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# Triton compiles the launchers of its kernels with a C compiler; bubblewrap confines the programs of the tool python,
# where the container may make namespaces
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap gcc libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/fovea
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY gym gym
COPY tools tools
COPY fovea fovea
COPY recipes recipes
# what is downloaded stays in a cache of the builder, not in the image
RUN --mount=type=cache,target=/root/.cache/pip pip install -c constraints.txt ./gym '.[geospot,hub,liger,ray,wandb]' ./tools

# not as root: a run reads files that others made. Its home is open to whoever `--user` names
RUN useradd --create-home fovea && chmod a+rwx /home/fovea
ENV HOME=/home/fovea USER=fovea
USER fovea
WORKDIR /home/fovea
ENTRYPOINT ["fovea"]
CMD ["--help"]
