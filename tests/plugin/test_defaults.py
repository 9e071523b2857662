"""Arguments of the marker for a folder, from conftest files."""

from __future__ import annotations


def test_the_nearest_place_wins_argument_by_argument(suite):
    marked = "@pytest.mark.gpu_memory\ndef test_it(gpu_memory): mib(10)\n"
    suite.write("test_top.py", marked)
    suite.write("models/test_a.py", "import pytest, torch\n" + marked.replace("mib(10)", "pass"))
    source = """
    import pytest, torch

    @pytest.mark.gpu_memory(batch_size=2)
    def test_b(gpu_memory):
        assert (gpu_memory.card, gpu_memory.batch_size) == ("L4", 2)
        torch.empty(10 << 20, device="cuda")
    """
    suite.write("models/test_b.py", source)
    suite.write(
        "models/conftest.py",
        "def pytest_gpumem_defaults(item): return {'card': 'L4', 'max_allocated_gib': 1}",
    )
    defaults = "{'max_allocated_gib': 0.001, 'batch_size': 4, 'card': 'T4'}"
    suite.write("conftest.py", f"def pytest_gpumem_defaults(item): return {defaults}")
    session = suite.run("-v")
    assert session.outcomes == {"passed": 1, "failed": 2}
    assert "over budget: peak allocated of 10.00 MiB" in session.flat  # test_top
    assert "allocated no memory on L4" in session.flat  # test_a: a limit, and the nearest card
    suite.write("models/conftest.py", "def pytest_gpumem_defaults(item): return {'max_gb': 1}")
    assert "there is no argument named max_gb" in suite.run("models/test_b.py").flat
