# Trains and serves on NVIDIA GPUs; the host has a driver and NVIDIA's container toolkit. In the checkout:
#   docker build -f docker/cuda.Dockerfile -t deepspeed:cuda .
#   docker run --rm --gpus all --shm-size 2g -p 8000:8000 -e DS_SERVE_TOKEN=TOKEN -v ./my-model:/models/model:ro deepspeed:cuda
#   docker run --rm --gpus all --shm-size 2g --no-healthcheck -v .:/work deepspeed:cuda deepspeed --num_gpus 2 train.py

FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN make wheel PYTHON=python3

FROM python:3.12-slim-bookworm
# Triton compiles what starts its kernels with it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# CUDA's libraries and Triton come with torch: no image of CUDA and no toolkit is needed.
RUN pip install --no-cache-dir torch==2.13.0
COPY --from=build /src/dist/*.whl /tmp/dist/
RUN pip install --no-cache-dir "$(echo /tmp/dist/*.whl)[serve,transformers]" && rm -r /tmp/dist
RUN useradd --create-home --uid 1000 deepspeed
USER 1000
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
EXPOSE 8000
# Of `ds serve`: a large model takes minutes to load.
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
CMD ["ds", "serve", "/models/model", "--host=0.0.0.0", "--port=8000"]
