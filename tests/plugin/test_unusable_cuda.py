"""A test after which CUDA refuses its calls: it alone is told, and later tests name it."""

from __future__ import annotations

CAPTURE = """
@pytest.mark.gpu_memory(baseline=False)
def test_first():
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.CUDAGraph().capture_begin()
        raise ValueError("planted")

@pytest.mark.gpu_memory(baseline=False)
def test_second():
    torch.ones(1 << 20, device="cuda")
"""

EMPTY_GRAPH = """
@pytest.mark.gpu_memory(baseline=False)
@pytest.mark.filterwarnings("error:The CUDA Graph is empty")
def test_first():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.empty(10, device="cuda")

@pytest.mark.gpu_memory(baseline=False)
def test_second():
    torch.ones(1 << 20, device="cuda")
"""

STICKY = """
BROKEN = []

def breaking(call):
    def refuse(*arguments):
        if BROKEN:
            raise RuntimeError("CUDA error: device-side assert triggered\\nand more")
        return call(*arguments)
    return refuse

@pytest.fixture(scope="module", autouse=True)
def cuda():
    patch = pytest.MonkeyPatch()
    for name in ("_cuda_synchronize", "_cuda_emptyCache"):
        patch.setattr(torch._C, name, breaking(getattr(torch._C, name)))
    yield
    patch.undo()

@pytest.mark.gpu_memory(baseline=False)
def test_first():
    torch.ones(1 << 20, device="cuda")
    BROKEN.append(1)

@pytest.mark.gpu_memory(baseline=False)
def test_second():
    torch.ones(1 << 20, device="cuda")

def test_unmarked(): pass
"""


def test_a_capture_that_a_test_did_not_end_is_ended_for_the_next_one(suite):
    session = suite.run_warm("-p", "no:randomly", source=CAPTURE)
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert "ValueError: planted" in session.out


def test_a_capture_that_ended_with_an_error_is_not_ended_again(suite):
    session = suite.run_warm("-p", "no:randomly", source=EMPTY_GRAPH)
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert "UserWarning: The CUDA Graph is empty" in session.out


def test_after_a_sticky_error_later_tests_are_refused_in_a_sentence_that_names_the_test(suite):
    session = suite.run_warm("-p", "no:randomly", source=STICKY)
    assert session.outcomes["errors"] == 1
    assert (
        "the CUDA device: an error in test_it.py::test_first left CUDA unusable in this process "
        "(CUDA error: device-side assert triggered)"
    ) in session.flat
    assert "pytest_gpumem/" not in session.out  # no traceback of this package


def test_an_error_of_a_kernel_after_the_last_line_is_the_test_s(suite, monkeypatch):
    """On a real GPU, which the virtual one stands in for here."""
    monkeypatch.setattr("pytest_gpumem.measurement.DeviceInfo.is_predicted", False)
    session = suite.run("-p", "no:randomly", source=STICKY)
    assert session.outcomes == {"failed": 1, "errors": 1, "passed": 1}
    assert "FAILED test_it.py::test_first - RuntimeError: CUDA error: device-side" in session.out
