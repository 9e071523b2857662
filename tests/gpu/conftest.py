"""What tests of a real GPU share: each runs sessions and scripts in processes of their own."""

import json
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpumem.devices.select import real_gpu_expected

HERE = Path(__file__).parent
FAKE = "GPUMEM_FAKE_GPU"
SLOW = 300
"""seconds that a process may take"""
CONFTEST = """
import json

def pytest_gpumem_measured(item, part, measurement):
    with open("figures", "a") as file:
        record = item.name, measurement.peak_allocated, measurement.peak_reserved
        file.write(json.dumps(record) + "\\n")
"""


class Machine:
    """A folder, and processes that run in it on the machine's GPU."""

    def __init__(self, pytester, monkeypatch):
        self._pytester = pytester
        self.path = pytester.path
        self.fake = os.environ.get(FAKE, "")
        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        pytester.makeini("[pytest]")
        pytester.makeconftest(CONFTEST)

    def script(self, code):
        """Run a program on the GPU, and return what it printed."""
        path = self._pytester.makepyfile(program=("import fake_gpu\n" if self.fake else "") + code)
        done = self._pytester.run(sys.executable, str(path), timeout=SLOW)
        assert done.ret == 0
        return done.stdout.str()

    def pytest(self, source, *args, device="cuda"):
        """Run a session, and return its exit status, output, outcomes, and figures by test."""
        self._pytester.makepyfile(test_it=source)
        plugins = [] if entry_points(group="pytest11", name="gpumem") else ["pytest_gpumem.plugin"]
        if self.fake and device == "cuda":
            plugins = ["fake_gpu", *plugins]
        loaded = [word for name in plugins for word in ("-p", name)]
        log = self.path / "figures"
        log.unlink(missing_ok=True)
        done = self._pytester.runpytest_subprocess(
            *loaded, f"--gpumem-device={device}", *args, timeout=SLOW
        )
        lines = log.read_text().splitlines() if log.exists() else []
        return SimpleNamespace(
            ret=done.ret,
            out=" ".join(done.stdout.str().split()),
            outcomes=done.parseoutcomes(),
            figures={name: tuple(peaks) for name, *peaks in map(json.loads, lines)},
        )


@pytest.fixture
def machine(pytester, monkeypatch):
    if not os.environ.get(FAKE) and not real_gpu_expected():
        pytest.skip("needs a real GPU: there is no NVIDIA driver here")
    return Machine(pytester, monkeypatch)


@pytest.fixture
def properties(machine):
    """The GPU's name and memory."""
    code = """
import json, torch
p = torch.cuda.get_device_properties(0)
print(json.dumps({"name": p.name, "total": p.total_memory}))
"""
    return SimpleNamespace(**json.loads(machine.script(code).splitlines()[-1]))
