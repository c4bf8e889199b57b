# Trains and serves on CPUs. In the checkout:
#   docker build -f docker/cpu.Dockerfile -t deepspeed:cpu .
#   docker run --rm --shm-size 2g -p 8000:8000 -e DS_SERVE_TOKEN=TOKEN -v ./my-model:/models/model:ro deepspeed:cpu
#   docker run --rm --shm-size 2g --no-healthcheck -v .:/work deepspeed:cpu deepspeed --num_gpus 2 train.py

FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN make wheel PYTHON=python3

FROM python:3.12-slim-bookworm
# Before the package, whose dependency would bring the CUDA build.
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY --from=build /src/dist/*.whl /tmp/dist/
RUN pip install --no-cache-dir "$(echo /tmp/dist/*.whl)[serve,transformers]" && rm -r /tmp/dist
RUN useradd --create-home --uid 1000 deepspeed
USER 1000
WORKDIR /work
EXPOSE 8000
# Of `ds serve`: a large model takes minutes to load.
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
CMD ["ds", "serve", "/models/model", "--host=0.0.0.0", "--port=8000"]
