# protosteer on the CPU: the command line, and by default the HTTP service of /models/model.protosteer.
#   docker build -t protosteer:0.2.0 .        (or: make image)
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/models:/models" protosteer:0.2.0
# For a Ray cluster, whose nodes KubeRay probes with wget:
#   docker build --build-arg EXTRAS=ray,serve --build-arg PACKAGES=wget -t protosteer-ray:0.2.0 .

FROM python:3.11.11-slim-bookworm AS build
ARG EXTRAS=serve
# PyTorch's own index has wheels without CUDA, which are a tenth of the others; all else comes from PyPI.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /build
RUN python -m venv /opt/protosteer
ENV PATH=/opt/protosteer/bin:$PATH
# Large and seldom changed, so that it comes before our own files.
COPY constraints.txt ./
RUN pip install -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install -c constraints.txt ".[$EXTRAS]"

FROM python:3.11.11-slim-bookworm
ARG PACKAGES=""
RUN if [ -n "$PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi \
    && groupadd --gid 1000 protosteer \
    && useradd --uid 1000 --gid 1000 --create-home protosteer \
    && install -d -o 1000 -g 1000 /models
COPY --from=build /opt/protosteer /opt/protosteer
COPY deploy/label_studio/backend.py /opt/label_studio/backend.py
# Weights that are fetched are kept beside the models.
ENV PATH=/opt/protosteer/bin:$PATH PYTHONUNBUFFERED=1 \
    PROTOSTEER_CACHE=/models/.cache/protosteer HF_HOME=/models/.cache/huggingface
# By number, so that a cluster can see that it is not root.
USER 1000:1000
WORKDIR /models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
ENTRYPOINT ["protosteer"]
CMD ["serve", "/models/model.protosteer", "--host", "0.0.0.0"]
