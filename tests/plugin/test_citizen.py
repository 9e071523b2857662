"""Beside other plugins and pytest's own options."""

from __future__ import annotations

import pytest

STEP = """
@pytest.mark.gpu_memory(max_gib=1)
def test_it():
    kept = mib(900)
    more = mib(200)
"""


def test_the_debugger_gets_the_frames_of_the_error_itself(suite):
    suite.write(
        "mydebugger.py",
        """
class Pdb:
    quitting = False
    def __init__(self, *args, **kwargs): pass
    def set_trace(self, *args): pass
    def reset(self): pass
    def interaction(self, frame, traceback):
        # Since Python 3.13 the error itself is given.
        traceback = getattr(traceback, "__traceback__", traceback)
        while traceback.tb_next:
            traceback = traceback.tb_next
        names = []
        frame = traceback.tb_frame
        while frame:
            names.append(frame.f_code.co_name)
            if frame.f_code.co_name == "test_it":
                print("KEPT", frame.f_locals["kept"].nbytes >> 20)
                break
            frame = frame.f_back
""",
    )
    suite.pytester.syspathinsert()
    session = suite.run("--pdb", "--pdbcls=mydebugger:Pdb", "-s", source=STEP)
    assert session.outcomes == {"failed": 1}
    assert "KEPT 900" in session.out
    assert "OutOfMemoryError" in session.out
    assert session.verdicts() == {"test_it": "out of memory"}


def test_of_a_test_that_is_rerun_the_last_run_counts_and_is_clean(suite):
    pytest.importorskip("pytest_rerunfailures")
    session = suite.run(
        "--reruns=2",
        "--gpumem-update-baselines",
        source="""
        runs = []

        @pytest.mark.gpu_memory
        def test_it():
            runs.append(1)
            kept = mib(100 * (4 - len(runs)))
            assert len(runs) == 3
        """,
    )
    assert session.outcomes == {"passed": 1, "rerun": 2}
    assert session.figures() == {"test_it": (100, 100)}
    assert suite.baselined() == {"test_it.py::test_it": (100, 100)}
    assert "left behind are not counted" not in session.flat


def test_a_verdict_is_rerun_like_any_failure(suite):
    pytest.importorskip("pytest_rerunfailures")
    session = suite.run("--reruns=1", source=STEP)
    assert session.outcomes == {"failed": 1, "rerun": 1}
    assert "gpumem: 1 out of memory" in session.out
    assert "it needs 1100.00 MiB" in session.flat


def test_a_timeout_and_errors_for_warnings(suite):
    pytest.importorskip("pytest_timeout")
    session = suite.run("--timeout=900", "-W", "error", source=STEP + "\ndef test_plain(): pass\n")
    assert session.outcomes == {"failed": 1, "passed": 1}
    assert session.verdicts() == {"test_it": "out of memory"}


def test_gradients_of_weights_that_are_results_warn_nobody(suite):
    session = suite.run(
        "-W",
        "error",
        source="""
        @pytest.mark.gpu_memory
        def test_it():
            layer = torch.nn.Linear(512, 512, device="cuda")
            weights = {name: weight * 1 for name, weight in layer.named_parameters()}
            x = torch.zeros(4, 512, device="cuda")
            torch.func.functional_call(layer, weights, (x,)).sum().backward()
        """,
    )
    assert session.outcomes == {"passed": 1}


@pytest.mark.parametrize(
    "step",
    [
        "y.backward()",
        "y.sum().backward(); y.sum().backward()",
        "torch.autograd.grad(y, x)",
        "torch.nn.Linear(2, 2).to('nowhere')",
    ],
)
def test_the_traceback_of_a_failed_step_has_no_frame_of_this_package(suite, step):
    source = """
    @pytest.mark.gpu_memory
    def test_it():
        x = torch.ones(4, device="cuda", requires_grad=True)
        y = x.exp()
        STEP
    """
    session = suite.run("--tb=short", source=source.replace("STEP", step))
    assert session.outcomes == {"failed": 1}
    assert "RuntimeError" in session.out
    assert "pytest_gpumem/" not in session.out


@pytest.mark.parametrize("style", ["short", "line", "no", "native"])
def test_every_style_of_traceback(suite, style):
    session = suite.run(f"--tb={style}", source=STEP)
    assert session.outcomes == {"failed": 1}
    assert "Traceback" not in session.out
    assert "does not fit in max_gib=1" in session.flat


def test_junit_has_the_verdict(suite):
    suite.run("--junitxml=junit.xml", source=STEP)
    assert "out of memory: the step does not fit" in (suite.path / "junit.xml").read_text()


def test_a_narrow_terminal_and_one_of_ascii_only(suite, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = suite.run(source=STEP.replace("test_it", "test_" + "x" * 60)).out
    ours = [line for line in out.splitlines() if not line.startswith("plugins: ")]
    assert max(map(len, ours)) < 120
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")


def test_exit_in_a_test_ends_the_session_cleanly(suite):
    source = "@pytest.mark.gpu_memory\ndef test_it():\n    mib(40)\n    pytest.exit('enough')\n"
    session = suite.run(source=source)
    assert "enough" in session.out
    assert "INTERNALERROR" not in session.out
    assert suite.run(source=STEP).verdicts() == {"test_it": "out of memory"}
