#!/usr/bin/env bash
# Builds the virtual GPU's library for aarch64 with a cross compiler and runs its test harness under emulation.
# PyTorch itself is not run: that needs an aarch64 machine.
#
#   apt install gcc-aarch64-linux-gnu qemu-user-static && bash tests/aarch64.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

native=pytest_gpumem/devices/virtual/native
compiler=aarch64-linux-gnu-gcc
flags=(-std=c11 -O2 -fPIC -fvisibility=hidden -pthread -Wall -Wextra -Werror "-I$native")
# Regions of 16 GiB in place of 1 TiB: the emulator keeps tables of them.
"$compiler" "${flags[@]}" -DREGION_SHIFT=34 "$native"/*/*.c tests/helpers/native_harness.c -o "$folder/harness" -ldl
"$compiler" "${flags[@]}" -shared "$native"/*/*.c -o "$folder/libgpumem_cuda.so" -Wl,-z,defs -ldl
said=$(qemu-aarch64-static -L /usr/aarch64-linux-gnu "$folder/harness")
[ "$said" = clean ]
{
    echo "The virtual GPU's native library on aarch64: built without warnings, its harness runs clean under emulation"
    echo "date $(date -u '+%Y-%m-%d %H:%M') UTC; commit $(git describe --always --dirty=+)"
    "$compiler" --version | head -n 1
    qemu-aarch64-static --version | head -n 1
    echo "not tried: PyTorch on aarch64"
} | tee benchmarks/results/aarch64.txt
