# Both commands of the README on a fresh Debian, on a CPU
#
#     docker build --target demo -t nemo_fp8_debug .           the demo; then TensorBoard with what it recorded:
#     docker run --rm -p 6006:6006 nemo_fp8_debug
#     docker build .                                           the tests too
FROM debian:bookworm-20260623-slim@sha256:60eac759739651111db372c07be67863818726f754804b8707c90979bda511df AS demo
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /nemo_fp8_debug
COPY . .
RUN scripts/setup.sh
# Arguments of scripts/demo.py, such as --steps 20
ARG DEMO=""
RUN scripts/demo.sh $DEMO
CMD [".venv/bin/tensorboard", "--logdir", "runs/demo", "--host", "0.0.0.0"]

FROM demo AS tests
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# Arguments of pytest
ARG TESTS=""
RUN scripts/test.sh $TESTS
