# docker build -t tico .                                             with torch for CUDA, which runs on CPUs too
# docker build -t tico --build-arg TORCH_INDEX=ADDRESS .             smaller: the index of CPU builds that pytorch.org names
# docker run --rm --gpus all -v "$PWD:/home/tico/work" tico pretrain photos --data photos/
FROM python:3.11-slim
ARG TORCH_INDEX
# Triton compiles kernels on the machine that trains: a C compiler is part of the image.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 tico
WORKDIR /build
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch torchvision
COPY pyproject.toml README.md LICENSE MANIFEST.in ./
COPY src ./src
RUN pip install --no-cache-dir --constraint constraints.txt ".[parquet,onnx,tiff,dicom]" && rm -rf /build
USER tico
WORKDIR /home/tico/work
ENTRYPOINT ["tico"]
CMD ["--help"]
