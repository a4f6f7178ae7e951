#!/usr/bin/env bash
# Makes the one image that the Dockerfile starts from, where it cannot be pulled: Debian with a C compiler, and the Rust
# toolchain of this machine, imported under the name that the Dockerfile uses. Needed: root, debootstrap, docker, and the
# toolchain in the version that the Dockerfile names. MIRROR names another Debian mirror.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(sed -n 's/^ARG RUST=//p' Dockerfile)
image="rust:$version-slim-bookworm"
if docker image inspect "$image" >/dev/null 2>&1; then
    echo "$image is there already"
    exit 0
fi
if timeout 600 docker pull --quiet "$image" 2>/dev/null; then
    exit 0
fi
# `cargo +VERSION` would fetch what is not there; a toolchain that is installed is asked by its folder instead.
toolchain=""
for folder in "$(rustc --print sysroot)" "${RUSTUP_HOME:-$HOME/.rustup}"/toolchains/*; do
    if [ -x "$folder/bin/rustc" ] && [[ "$("$folder/bin/rustc" --version)" == "rustc $version."* ]]; then
        toolchain=$(readlink -f "$folder")
        break
    fi
done
[ -n "$toolchain" ] || { echo "no Rust $version is installed here; install it, or build with --build-arg RUST=..." >&2; exit 1; }

root=$(mktemp -d "${TMPDIR:-/tmp}/concertina-base.XXXXXX")
trap 'rm -rf "$root"' EXIT
echo "making $image from Debian bookworm and $toolchain"
debootstrap --variant=minbase --include=ca-certificates,gcc,libc6-dev bookworm "$root" ${MIRROR:+"$MIRROR"} > "$root.log" || { tail "$root.log" >&2; exit 1; }
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
mkdir -p "$root/usr/local/rust"
for part in bin/cargo bin/rustc lib libexec; do
    [ ! -e "$toolchain/$part" ] || (cd "$toolchain" && cp --archive --parents "$part" "$root/usr/local/rust/")
done
rm -rf "$root"/usr/local/rust/lib/rustlib/{src,etc,rustc-src}
# Where this machine reaches the network through a certificate of its own, the build does as well.
[ ! -f /etc/ssl/certs/ca-certificates.crt ] || cp --dereference /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
tar --create --directory="$root" --one-file-system --exclude=./dev --exclude=./proc --exclude=./sys . \
    | docker import --change 'ENV PATH=/usr/local/rust/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
        --change 'ENV CARGO_HOME=/usr/local/cargo' --change 'CMD ["/bin/bash"]' - "$image"
rm -f "$root.log"
