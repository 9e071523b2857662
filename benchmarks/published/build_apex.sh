#!/usr/bin/env bash
# Builds what apex's setup.py refuses to build where nvcc's CUDA is not torch's: the extensions that megatron.py calls.
# Their device code, for an H100, never runs. Every allocation is made by host code, which does not depend on CUDA's version.
#
#   bash benchmarks/published/build_apex.sh APEX PYTHON
#
# APEX is a checkout of NVIDIA/apex. They are installed for PYTHON, whose torch comes from the package index (CUDA 12).
set -euo pipefail
cd -- "$1"
python=$2

# Lines of include directories, of the directory to install to, and of the file name's ending.
mapfile -t told < <("$python" - <<'EOF'
import sysconfig
paths = sysconfig.get_paths()
print(paths["platlib"], paths["include"], sysconfig.get_config_var("EXT_SUFFIX"), sep="\n")
EOF
)
site=${told[0]}
include=("-I$site/torch/include" "-I$site/torch/include/torch/csrc/api/include" "-I${told[1]}" -Icsrc -Icsrc/megatron)
for package in "$site"/nvidia/*/include; do include+=(-isystem "$package"); done
libraries=(-L"$site/torch/lib" -lc10 -lc10_cuda -ltorch -ltorch_cpu -ltorch_cuda -ltorch_python)
libraries+=(-L"$site/nvidia/cuda_runtime/lib" -l:libcudart.so.12 -L"$site/nvidia/cublas/lib" -l:libcublas.so.12)
halves=(-D__CUDA_NO_HALF_OPERATORS__ -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_BFLOAT16_CONVERSIONS__)
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT

build() { # build NAME FLAG SOURCE...
    local name=$1 flags=$2 path built=()
    shift 2
    for path in "$@"; do
        local object compiler=(g++ -std=c++17 -fPIC)
        object=$objects/$name-$(basename "$path").o
        if [[ $path == *.cu ]]; then
            compiler=(nvcc -std=c++17 -gencode 'arch=compute_90,code=sm_90' -Xcompiler -fPIC --expt-relaxed-constexpr)
            [ "$flags" = halves ] && compiler+=("${halves[@]}")
        fi
        "${compiler[@]}" "${include[@]}" -DTORCH_API_INCLUDE_EXTENSION_H "-DTORCH_EXTENSION_NAME=$name" -c "$path" -o "$object"
        built+=("$object")
    done
    g++ -shared "${built[@]}" -o "$site/$name${told[2]}" "${libraries[@]}"
}

build fused_layer_norm_cuda halves csrc/layer_norm_cuda.cpp csrc/layer_norm_cuda_kernel.cu
build fused_weight_gradient_mlp_cuda '' csrc/megatron/fused_weight_gradient_dense{.cpp,_cuda.cu,_16bit_prec_cuda.cu}
for kind in scaled_masked_softmax scaled_upper_triang_masked_softmax; do
    build "${kind}_cuda" '' "csrc/megatron/$kind.cpp" "csrc/megatron/${kind}_cuda.cu"
done
cp -r apex "$site/"
