#!/usr/bin/env bash
# Builds examples/Containerfile without a daemon, runs a suite in the image as the guide does, and records both
# (benchmarks/results/container.txt). It needs root, Debian's mirror and the package index, but no registry of images:
# what stands in for python:3.12-slim is made of Debian and a Python of this machine.
#
#   apt install buildah crun debootstrap && bash tests/container.sh ~/.pyenv/versions/3.12.1
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
python=$1
folder=$(mktemp -d)
trap '$buildah rm --all >/dev/null; $buildah rmi --all --force >/dev/null; rm -rf "$folder"' EXIT
buildah="buildah --root $folder/store --runroot $folder/run --storage-driver overlay"
build() { $buildah bud --isolation chroot --network host --pull-never --layers -f examples/Containerfile "$@" . >&2; }

base=$folder/base
debootstrap --variant=minbase bookworm "$base" >&2
cp /etc/resolv.conf /etc/hosts "$base/etc"
libraries=(libbz2-1.0 libffi8 liblzma5 libncursesw6 libreadline8 libsqlite3-0 libssl3 libuuid1 zlib1g)
chroot "$base" apt-get update -qq
chroot "$base" apt-get install -yqq --no-install-recommends ca-certificates netbase tzdata "${libraries[@]}" >&2
chroot "$base" apt-get clean
rm -rf "$base"/var/lib/apt/lists/*
cp /etc/ssl/certs/ca-certificates.crt "$base/etc/ssl/certs" # of this network
cp -a "$python"/lib/. "$base/usr/local/lib"
rm -rf "$base"/usr/local/lib/python3.*/site-packages/*
find "$base/usr/local/lib" \( -name __pycache__ -o -name test -o -name tests -o -name '*.a' \) -prune -exec rm -rf {} +
cp "$python"/bin/python3.?? "$base/usr/local/bin"
(cd "$base/usr/local/bin" && ln -sf python3.?? python3 && ln -s python3 python)
chroot "$base" ldconfig
(unset PIP_FIND_LINKS && chroot "$base" python -m ensurepip && chroot "$base" python -m pip install pip==25.0.1) >&2
ln -sf pip3 "$base/usr/local/bin/pip"
find "$base/usr/local/lib" -name __pycache__ -prune -exec rm -rf {} +
container=$($buildah from scratch)
cp -a "$base/." "$($buildah mount "$container")"
$buildah umount "$container" >/dev/null
$buildah config --env PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
$buildah commit --rm -q "$container" docker.io/library/python:3.12-slim >/dev/null

mkdir "$folder/suite"
cat >"$folder/suite/test_step.py" <<'PYTHON'
import pytest
import torch


@pytest.mark.gpu_memory(card="T4", batch_size=32)
def test_step(gpu_memory):
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True).cuda()
    layer(torch.randn(gpu_memory.batch_size, 256, 1024, device="cuda")).sum().backward()


@pytest.mark.gpu_memory(card="H100")
def test_convolution():
    images = torch.randn(8, 64, 56, 56, device="cuda")
    torch.nn.Conv2d(64, 64, 3).cuda()(images).sum().backward()
PYTHON
run() { # run IMAGE: the size of the image, and the table of the suite that its entry point runs
    local container
    build -t "$@"
    container=$($buildah from --pull-never "localhost/$1")
    $buildah images --format '{{.Name}} {{.Size}}' "localhost/$1"
    $buildah run --isolation chroot -v "$folder/suite:/suite" "$container" -- sh -c \
        'python -m pytest --gpumem-device=virtual --gpumem-missing-baseline=note -p no:cacheprovider -v' |
        grep -E '^(test  |on virtual|  test_)|passed'
    $buildah run --isolation chroot "$container" -- gpumem version | grep -E '^(Python|torch|virtual GPU)'
}
{
    echo "examples/Containerfile, built and run without a daemon (tests/container.sh)"
    changed=$(git status --porcelain -- pytest_gpumem setup.py pyproject.toml README.md LICENSE examples)
    commit=$(git rev-parse --short HEAD)${changed:+"+"} # of what the image is made of
    echo "date $(date -u '+%Y-%m-%d %H:%M') UTC; commit $commit; $(buildah --version)"
    echo "In place of python:3.12-slim: Debian 12, minbase, with a Python of this machine and pip 25.0.1"
    echo 'not tried: Docker, Podman, python:3.12-slim itself, arm64, a Mac'
    echo
    run gpumem
    echo
    echo 'with --build-arg LIGHT='
    run gpumem-light --build-arg LIGHT=
} | tee benchmarks/results/container.txt
