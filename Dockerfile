# Images of Concertina: `cpu` and `cuda`; name the target, since without one it is the last. `make image` builds the first, `make
# image-cuda` the second; both commands fetch ONNX Runtime into .setup/ beforehand, pinned by hash, and the build only copies it. (The
# stages of the first come first: an engine without BuildKit builds all in front of the target.)
#
# The images hold the server, the libraries it loads, and nothing else: no shell, no package manager, no compiler.

ARG RUST=1.95

# ---------------------------------------------------------------------------------------------------------------------
FROM rust:${RUST}-slim-bookworm AS build
WORKDIR /src

# Dependencies first: this layer is built anew only when they change.
COPY Cargo.toml Cargo.lock ./
RUN mkdir src && touch src/lib.rs && echo 'fn main() {}' > src/main.rs && cargo build --release --locked --bin concertina

COPY . .
# Line tables are for a debugger beside a source tree; panics keep their place in the source without them.
RUN touch src/lib.rs src/main.rs && cargo build --release --locked --bin concertina \
    && install -D --strip target/release/concertina /image/usr/local/bin/concertina

# What a program of this image needs of the distribution: the C and C++ libraries with the loader, and, for scanners, which
# packages they came from. Directories that are links there (/lib, /lib64) are links here.
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
RUN mkdir -p /image/etc /image/models /image/var/lib/dpkg/status.d \
    && mkdir --mode=1777 /image/tmp \
    && for folder in lib lib64; do \
         if [[ -L /$folder ]]; then mkdir -p "/image/usr/$folder" && cp --archive "/$folder" /image/; fi; \
       done \
    && for package in libc6 libgcc-s1 libstdc++6; do \
         dpkg-query --listfiles "$package" | grep -E '[.]so([.][0-9.]+)?$' | grep --invert-match -e /gconv/ -e /audit/ \
           | sed 's,^/,,' | tar --create --directory=/ --files-from=- \
           | tar --extract --directory=/image --keep-directory-symlink; \
         dpkg-query --status "$package" > "/image/var/lib/dpkg/status.d/$package"; \
       done \
    && cp --dereference /etc/os-release /image/etc/os-release \
    && echo 'concertina:x:10001:10001::/tmp:/nonexistent' > /image/etc/passwd \
    && echo 'concertina:x:10001:' > /image/etc/group

# ---------------------------------------------------------------------------------------------------------------------
FROM scratch AS base
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Concertina" \
      org.opencontainers.image.description="An HTTP inference server for ONNX models, its batches sized by live free memory" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /image /
ENV CONCERTINA_ADDRESS=0.0.0.0:8000 \
    CONCERTINA_MODELS=/models \
    CONCERTINA_CACHE=/tmp/concertina \
    CONCERTINA_LOG_FORMAT=json \
    ORT_DISABLE_TELEMETRY=1
# A number, since Kubernetes cannot see that a name is not root's.
USER 10001:10001
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
# Readiness, for engines that have only one kind of check; Kubernetes has its own probes and ignores this.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=2 CMD ["/usr/local/bin/concertina", "healthcheck"]
ENTRYPOINT ["/usr/local/bin/concertina"]
CMD ["serve"]

# ---------------------------------------------------------------------------------------------------------------------
FROM base AS cpu
# Beside the executable is where the server looks last, so a library that somebody mounts and names prevails.
COPY .setup/onnxruntime/ /usr/local/bin/

# ---------------------------------------------------------------------------------------------------------------------
# What `make setup-gpu` has fetched, in two folders: ONNX Runtime with its CUDA provider, and CUDA's libraries. The driver's own
# come from the host, by NVIDIA's container toolkit.
FROM build AS gpu
RUN mkdir -p /gpu/usr/local/lib/onnxruntime /gpu/usr/local/lib/cuda \
    && cp .setup/gpu/onnxruntime/capi/libonnxruntime*.so* /gpu/usr/local/lib/onnxruntime/ \
    && rm -f /gpu/usr/local/lib/onnxruntime/*tensorrt* \
    && find .setup/gpu/nvidia -name 'lib*.so*' -exec cp --archive --target-directory /gpu/usr/local/lib/cuda {} +

FROM base AS cuda
COPY --from=gpu /gpu /
# `void`: a pod that asks for no GPU sees none, also where NVIDIA's runtime is the node's default.
ENV NVIDIA_VISIBLE_DEVICES=void \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/lib/onnxruntime:/usr/local/lib/cuda \
    CONCERTINA_ONNXRUNTIME=/usr/local/lib/onnxruntime/libonnxruntime.so.1.31.1 \
    CUDA_CACHE_PATH=/tmp/cuda
CMD ["serve", "--set", "runtime.providers=cuda"]
