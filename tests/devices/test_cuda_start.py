"""What keeps CUDA from being initialised, or memory from being reserved, is named in every test."""

from __future__ import annotations

import resource

from helpers.torch_features import RELEASE
from helpers.warm import warm_python

TWO = """
@pytest.mark.gpu_memory
def test_one():
    mib(30)

@pytest.mark.gpu_memory
def test_two():
    mib(30)
"""


def test_settings_that_pytorch_cannot_parse_are_an_error_of_each_test(suite, monkeypatch):
    """PyTorch's second try to initialise CUDA ended the process with a segmentation fault."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:abc")
    session = suite.run_warm(source=TWO)
    assert session.outcomes == {"errors": 2}
    message = (
        "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:abc: PyTorch cannot initialise CUDA with these "
        "allocator settings (RuntimeError: {}); correct or unset the variable"
    )
    message = message.format("stoull" if RELEASE >= (2, 10) else "stoi")
    assert session.flat.count(message) == 2
    suite.write("step.py", "import torch")
    program = "from pytest_gpumem.cli.main import main\nraise SystemExit(main(['run', 'step.py']))"
    done = suite.python(program, python=warm_python())
    assert done.ret == 2
    assert message in " ".join(done.err.split())


LIMITED = f"""
import resource

from helpers.torch_features import RELEASE

_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, ({1 << 38}, most))
"""


def test_a_limit_on_address_space_is_named_and_is_no_lack_of_memory(suite):
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    suite.write("conftest.py", LIMITED)
    session = suite.run_warm(source=TWO)
    assert session.outcomes == {"errors": 2}
    assert "out of memory" not in session.out
    assert "it needs 1024.00 GiB of address space (not of memory)" in session.flat
    assert "limit of this process is 256.00 GiB (ulimit -v)" in session.flat


REFUSED = """
import ctypes

@pytest.mark.gpu_memory(max_gib=1)
def test_refused():
    torch.zeros(1, device="cuda")
    ctypes.CDLL("libcuda.so.1").cuGreenCtxCreate(None, None, 0, 0)
    mib(2000)
"""


def test_out_of_memory_after_a_call_that_is_not_supported_means_nothing(suite):
    session = suite.run(source=REFUSED)
    assert session.outcomes == {"failed": 1}
    assert "this measurement: the virtual GPU does not support cuGreenCtxCreate" in session.flat
    assert "does not fit" not in session.out
