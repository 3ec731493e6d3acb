# An image for `tfmulti kubernetes manifest`, or for any container engine. On CPUs:
#
#     docker build -t tfmulti .
#
# On GPUs, whose driver the machine has; the wheels bring CUDA and NCCL:
#
#     docker build --build-arg EXTRAS=gpu,images -t tfmulti:gpu .
#
# For a program of your own, begin from this image and copy the program to /app.
ARG BASE=python:3.13-slim
FROM ${BASE}

ARG EXTRAS=images
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2

WORKDIR /src
COPY pyproject.toml setup.cfg setup.py README.md LICENSE ./
COPY tfmulti ./tfmulti
RUN pip install ".[${EXTRAS}]"

# Kubernetes refuses an image that runs as root, and the manifest names this user.
RUN useradd --uid 1000 --create-home worker && mkdir -p /app /runs && chown worker /app /runs
USER 1000
WORKDIR /app

ENTRYPOINT []
# The shim is the first process of the container and lets SIGTERM end the program at any time. `env`
# makes a SIGTERM wait that comes before Python runs; without it Linux would drop the signal.
CMD ["env", "--block-signal=TERM", "python", "-m", "tfmulti.launch.shim", "-m", "tfmulti.fit"]
