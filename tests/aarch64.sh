#!/usr/bin/env bash
# Builds the virtual GPU's library for aarch64 with a cross compiler, and runs its test harness under emulation. Does the
# same with a stub, which stands in for a CUDA library that is not installed: a program that needs one is run.
# With a version of PyTorch, the README's test is run under emulation too, without NVIDIA's packages: minutes.
#
#   apt install gcc-aarch64-linux-gnu qemu-user-static debootstrap && pip install uv && bash tests/aarch64.sh [2.15.0]
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

native=pytest_gpumem/devices/virtual/native
compiler=aarch64-linux-gnu-gcc
flags=(-std=c11 -O2 -fPIC -fvisibility=hidden -pthread -Wall -Wextra -Wno-unused-parameter -Werror "-I$native")
# Regions of 16 GiB in place of 1 TiB: the emulator keeps tables of them.
listed='import runpy, setuptools; setuptools.setup = dict; print(runpy.run_path("setup.py")["listed_source"]())'
python3 -c "$listed" >"$folder/listed.c"
"$compiler" "${flags[@]}" -DREGION_SHIFT=34 "$native"/*/*.c "$folder/listed.c" tests/helpers/native_harness.c -o "$folder/harness" -ldl
"$compiler" "${flags[@]}" -shared "$native"/*/*.c "$folder/listed.c" -o "$folder/libgpumem_cuda.so" -Wl,-z,defs -ldl
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

# Run the README's step with a PyTorch for aarch64, in an environment without NVIDIA's packages: Debian's Python under
# emulation. What the emulator lacks of a processor's files is written: oneDNN and cpuinfo read them.
run_torch() { # run_torch VERSION
    local root=$folder/root site=$folder/site source=$folder/source package cpu identification
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1 bookworm "$folder/debian" >&2
    for package in "$folder"/debian/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
    mkdir -p "$root/proc"
    for cpu in 0 1; do
        identification=$root/sys/devices/system/cpu/cpu$cpu/regs/identification
        mkdir -p "$identification"
        echo 0x00000000413fd0c1 >"$identification/midr_el1"
        printf 'processor\t: %d\nFeatures\t: %s\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n' \
            "$cpu" 'fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp' >>"$root/proc/cpuinfo"
    done
    python3 -c 'from pytest_gpumem.cli.main import main; main()' light --excludes >"$folder/excludes.txt"
    uv pip install --quiet --target "$site" --python-platform aarch64-manylinux_2_28 --python-version 3.11 \
        --only-binary :all: --excludes "$folder/excludes.txt" -r pyproject.toml "torch==$1"
    mkdir "$source"
    cp -r pytest_gpumem setup.py pyproject.toml README.md LICENSE "$source"
    rm -f "$source/$native"/*.so*
    (cd "$source" && CC=$compiler CFLAGS=-DREGION_SHIFT=34 python3 setup.py --quiet build_ext --inplace) >&2
    sed -i 's/1 << 40, 64/1 << 34, 64/' "$source/pytest_gpumem/devices/virtual/library.py"
    cat >"$folder/step.py" <<'PYTHON'
import platform
import pytest_gpumem
from pytest_gpumem.devices.torch_build import torch_folder
from pytest_gpumem.devices.virtual.missing_libraries import missing_libraries

missing = [name for name in missing_libraries(torch_folder() / "lib") if name.startswith(("libcu", "libn"))]
pytest_gpumem.use_virtual_gpu("T4")
import torch

print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, under emulation")
print(f"stubs stand in for {len(missing)} libraries of CUDA's: {' '.join(missing)}")
layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True).cuda()
layer(torch.randn(32, 256, 1024, device="cuda")).sum().backward()
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
print("README's test on a virtual T4: {:,} bytes allocated, {:,} reserved".format(*peaks))
PYTHON
    PYTHONPATH="$source:$site" qemu-aarch64-static -cpu neoverse-n1 -L "$root" "$root/usr/bin/python3.11" -W ignore "$folder/step.py"
}
echo 'not tried: PyTorch on aarch64' >"$folder/torch.txt"
if [ $# -gt 0 ]; then
    run_torch "$1" >"$folder/torch.txt"
    echo 'not tried: a machine with such a processor' >>"$folder/torch.txt"
fi
{
    echo "The virtual GPU's native library on aarch64: built without warnings, its harness runs clean under emulation"
    echo "A stub for aarch64: a library that needs libcudart.so.13 is loaded with it under emulation, and not without"
    echo "date $(date -u '+%Y-%m-%d %H:%M') UTC; commit $(git describe --always --dirty=+)"
    "$compiler" --version | head -n 1
    qemu-aarch64-static --version | head -n 1
    cat "$folder/torch.txt"
} | tee benchmarks/results/aarch64.txt
