"""The native library under AddressSanitizer, UBSan and ThreadSanitizer: many threads at once."""

import os
import subprocess

import pytest
from helpers.native_sources import NATIVE, SOURCES, compiler, write_listed_source
from helpers.paths import HELPERS
from helpers.warm import HANGS

HARNESS = HELPERS / "native_harness.c"
STAND_IN = HELPERS / "stand_in_cudnn.c"


def build(folder, sanitizers):
    """Build the harness with the library's sources; skips where the compiler has no sanitizers."""
    program = folder / "harness"
    flags = ["-g", "-O1", "-std=c11", "-fno-omit-frame-pointer", f"-fsanitize={sanitizers}"]
    trial = folder / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    tried = subprocess.run([*compiler(), *flags, trial, "-o", folder / "trial"], check=False)
    if tried.returncode or subprocess.run([folder / "trial"], check=False).returncode:
        pytest.skip(f"{compiler()[0]} cannot build or run programs with -fsanitize={sanitizers}")
    rest = ["-DREGION_SHIFT=34"] if sanitizers == "thread" else []  # its shadow leaves no 1 TiB
    rest += ["-pthread", "-rdynamic", "-ldl", "-fno-sanitize-recover=all", "-o", program]
    done = subprocess.run(
        [
            *(*compiler(), *flags, f"-I{NATIVE}", HARNESS, *SOURCES, write_listed_source(folder)),
            *rest,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def program(request, tmp_path_factory):
    """The harness, built with sanitizers."""
    return build(tmp_path_factory.mktemp("harness"), request.param)


@pytest.mark.parametrize("asked", [True, False], ids=["cuDNN asked", "not asked"])
def test_no_sanitizer_finds_a_fault(tmp_path, program, asked):
    cudnn = tmp_path / "libcudnn.so.9"
    subprocess.run([*compiler(), "-shared", "-fPIC", STAND_IN, "-o", cudnn], check=True)
    options = {
        "GPUMEM_CUDNN": str(cudnn) if asked else "none",
        "STAND_IN_LOG": str(tmp_path / "log"),
        "ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1",
        "TSAN_OPTIONS": "halt_on_error=1",
        "LSAN_OPTIONS": f"suppressions={tmp_path / 'none'}",
    }
    (tmp_path / "none").touch()
    done = subprocess.run(
        [program],
        env={**os.environ, **options, "LD_PRELOAD": ""},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.stdout == "clean\n", done.stderr[-4000:]
    assert done.returncode == 0, done.stderr[-4000:]
