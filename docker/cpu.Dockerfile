# syntax=docker/dockerfile:1
# Fovea without CUDA: the demo, evaluation against servers, own rewards on a tiny model. From the root of a checkout:
#   docker build -f docker/cpu.Dockerfile -t fovea:cpu .
FROM python:3.12-slim-bookworm

# wheels of torch without CUDA, which are several GB smaller
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu \
    PIP_DISABLE_PIP_VERSION_CHECK=1

# confines the programs of the tool python, where the container may make namespaces
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/fovea
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY gym gym
COPY tools tools
COPY fovea fovea
COPY recipes recipes
# what is downloaded stays in a cache of the builder, not in the image
RUN --mount=type=cache,target=/root/.cache/pip pip install -c constraints.txt ./gym '.[geospot,hub,talk]' ./tools

# not as root: a run reads files that others made. Its home is open to whoever `--user` names
RUN useradd --create-home fovea && chmod a+rwx /home/fovea
ENV HOME=/home/fovea USER=fovea
USER fovea
WORKDIR /home/fovea
ENTRYPOINT ["fovea"]
CMD ["--help"]
