#!/usr/bin/env bash
# Builds the virtual GPU's library for aarch64 with a cross compiler, and runs its test harness under emulation. Does the
# same with a stub, which stands in for a CUDA library that is not installed: a program that needs one is run.
# PyTorch itself is not run: that needs an aarch64 machine. Of its wheel, the libraries that it needs are read.
#
#   apt install gcc-aarch64-linux-gnu qemu-user-static && bash tests/aarch64.sh [torch-...aarch64.whl]
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

# As setup.py builds it, and as missing_libraries.py gives it a name.
placeholder=libgpumem-stub-$(printf 'x%.0s' {1..48})
echo 'typedef int nothing;' >"$folder/empty.c"
"$compiler" "${flags[@]}" -shared "$folder/empty.c" -o "$folder/libgpumem_stub.so" "-Wl,-soname,$placeholder" \
    -Wl,--no-as-needed '-Wl,-rpath,$ORIGIN' "$folder/libgpumem_cuda.so"
python3 - "$folder" <<'PYTHON'
import sys
from pathlib import Path

sys.path.insert(0, ".")
from pytest_gpumem.devices.virtual.missing_libraries import PLACEHOLDER

folder = Path(sys.argv[1])
stub = (folder / "libgpumem_stub.so").read_bytes()
assert stub.count(PLACEHOLDER) == 1
name = b"libcudart.so.13"
(folder / "libcudart.so.13").write_bytes(stub.replace(PLACEHOLDER, name.ljust(len(PLACEHOLDER), b"\0")))
PYTHON
stub=$(aarch64-linux-gnu-readelf -hd "$folder/libcudart.so.13")
grep -q 'Machine: *AArch64' <<<"$stub"
grep -q 'Library soname: \[libcudart.so.13\]' <<<"$stub"
cat >"$folder/needs.c" <<'C'
extern int cudaRuntimeGetVersion(int *);
int needs(void) { int version; return cudaRuntimeGetVersion(&version); }
C
cat >"$folder/loads.c" <<'C'
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **paths) {
    int (*needs)(void);
    for (int i = 1; i < count; i++) {
        void *library = dlopen(paths[i], RTLD_NOW | (i == 1 ? RTLD_GLOBAL : RTLD_LOCAL));
        if (!library) return puts(dlerror()), 1;
        if (i == count - 1) *(void **)&needs = dlsym(library, "needs");
    }
    return printf("status %d\n", needs()), 0;
}
C
"$compiler" -shared -fPIC "$folder/needs.c" -o "$folder/needs.so" -Wl,--no-as-needed "$folder/libcudart.so.13"
"$compiler" "$folder/loads.c" -o "$folder/loads" -ldl
mkdir "$folder/apart"
mv "$folder/libcudart.so.13" "$folder/apart" # where the dynamic linker does not look for it
ln -s ../libgpumem_cuda.so "$folder/apart"
load() { (cd "$folder" && qemu-aarch64-static -L /usr/aarch64-linux-gnu ./loads "$@"); }
without=$(load ./libgpumem_cuda.so ./needs.so || true)
grep -q 'libcudart.so.13: cannot open shared object file' <<<"$without"
[ "$(load ./libgpumem_cuda.so ./apart/libcudart.so.13 ./needs.so)" = 'status 0' ]

read_wheel() { # read_wheel WHEEL: what its libraries need of CUDA's, and whether stubs stand in for all of them
    python3 - "$1" "$folder/wheel" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

sys.path.insert(0, ".")
from pytest_gpumem.devices.virtual.missing_libraries import STUBBED, missing_libraries

with zipfile.ZipFile(sys.argv[1]) as wheel:
    libraries = [name for name in wheel.namelist() if ".so" in name and "/lib" in name]
    wheel.extractall(sys.argv[2], libraries)
missing = missing_libraries(Path(sys.argv[2], "torch/lib"))
missing.remove("ld-linux-aarch64.so.1")  # this machine has that of its own processor
unknown = [name for name in missing if not STUBBED.fullmatch(name)]
assert missing and not unknown, unknown
print(f"{Path(sys.argv[1]).name} needs {len(missing)} libraries of CUDA's, and stubs stand in for all:")
print(*missing)
PYTHON
}
of_wheel='not tried: PyTorch on aarch64'
[ $# -eq 0 ] || of_wheel+=$'\n'$(read_wheel "$1")
{
    echo "The virtual GPU's native library on aarch64: built without warnings, its harness runs clean under emulation"
    echo "A stub for aarch64: a library that needs libcudart.so.13 is loaded with it under emulation, and not without"
    echo "date $(date -u '+%Y-%m-%d %H:%M') UTC; commit $(git describe --always --dirty=+)"
    "$compiler" --version | head -n 1
    qemu-aarch64-static --version | head -n 1
    echo "$of_wheel"
} | tee benchmarks/results/aarch64.txt
