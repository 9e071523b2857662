"""What a JSON report holds of a small test: sessions of 20,000 such tests are written and read."""

import shutil

MOST = 3_000
"""bytes a test of one tensor"""


def test_a_report_has_as_many_bytes_a_test_however_many_tests_there_are(suite):
    sizes = {}
    for count in (1, 11, 21):
        shutil.rmtree(suite.path / "baselines", ignore_errors=True)
        suite.run(
            *("--gpumem-json=r.json", "--gpumem-update-baselines"),
            source=f"""
    @pytest.mark.parametrize("number", range(10, {10 + count}))
    @pytest.mark.gpu_memory
    def test_it(number):
        torch.empty(2**20, device="cuda")
    """,
        )
        sizes[count] = (suite.path / "r.json").stat().st_size
    first, second = sizes[11] - sizes[1], sizes[21] - sizes[11]
    assert abs(second - first) <= 20 * 10  # digits of numbers
    assert second < 10 * MOST
