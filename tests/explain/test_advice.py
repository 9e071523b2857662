"""What a report advises where a test does not fit: each was tried."""

from __future__ import annotations

from helpers.sources import SIZED

STEP = f"""{SIZED.format(fixed=100, per_sample=10)}
def test_log_before():
    pass
"""
TEST = """
@pytest.mark.gpu_memory(max_gib=1, batch_size=128)
def test_it(gpu_memory):
    step(gpu_memory.batch_size)
"""
"""does not fit: its batch takes 1380 MiB"""


def run(suite, body, *options):
    log = "\ndef test_log():\n    print('log', log)\n"
    return suite.run("-s", *options, source=STEP + body + log)


def test_the_largest_micro_batch_that_divides_the_batch_and_its_steps(suite):
    session = run(suite, TEST)
    assert session.verdicts() == {"test_it": "out of memory"}
    assert (
        "hint: batch size 64 fits, with 740.00 MiB of 1024.00 MiB reserved: 2 accumulation "
        "steps make 128; the largest batch size that fits is 92"
    ) in session.flat
    assert "batch norm" not in session.flat
    tried = session.out.partition("log [")[2].partition("]")[0].split(", ")
    assert {"64", "92", "93"} <= set(tried)
    assert len(tried) < 10


def test_batch_norm_is_told_of(suite):
    session = run(
        suite,
        """
@pytest.mark.gpu_memory(max_gib=1, batch_size=128)
def test_it(gpu_memory):
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).cuda()
    net(torch.ones(gpu_memory.batch_size, 8, device="cuda"))
    step(gpu_memory.batch_size)

@pytest.mark.gpu_memory(max_gib=1, batch_size=128)
def test_in_evaluation(gpu_memory):
    net = torch.nn.BatchNorm1d(8).cuda().eval()
    net(torch.ones(gpu_memory.batch_size, 8, device="cuda"))
    step(gpu_memory.batch_size)
""",
    )
    text = "batch norm then computes its statistics from 64 samples, not from 128"
    assert session.flat.count(text) == 1


def test_a_test_that_does_not_ask_for_its_batch_size_is_not_run_with_another(suite):
    body = "@pytest.mark.gpu_memory(max_gib=1, batch_size=128)\ndef test_it(): step(128)\n"
    session = run(suite, body)
    assert "accumulation steps" not in session.flat
    assert "log [128, 128]" in session.out  # as it is, and without the limit


def test_where_not_even_one_fits_that_is_said(suite):
    small = TEST.replace("max_gib=1, batch_size=128", "max_gib=0.0625, batch_size=4")
    session = run(suite, small)
    assert "hint: not even batch size 1 fits in 64.00 MiB" in session.flat


def test_variants_are_tried_as_they_are_declared(suite):
    session = run(
        suite,
        """
@pytest.mark.gpu_memory(
    max_gib=1,
    variants={"amp": {"per_sample": 5}, "checkpoint": {"per_sample": 9}, "wrong": {"x": 1}},
)
def test_it(gpu_memory):
    step(128, **gpu_memory.variant)
""",
    )
    assert session.verdicts() == {"test_it": "out of memory"}
    assert "hint: variant 'amp' fits: 740.00 MiB of 1024.00 MiB reserved, 740.00 MiB" in (
        session.flat
    )
    assert "hint: variant 'checkpoint' does not fit" in session.flat
    assert "hint: variant 'wrong' fails: TypeError: step() got an unexpected keyword argument" in (
        session.flat
    )


def test_a_variant_may_use_more_of_the_tests_devices(suite):
    session = run(
        suite,
        """
@pytest.mark.gpu_memory(max_gib=1, devices=2, variants={"two devices": {"devices": 2}})
def test_it(gpu_memory):
    devices = gpu_memory.devices[: gpu_memory.variant.get("devices", 1)]
    tensors = [mib(1400 // len(devices), device) for device in devices]
    assert tensors
""",
    )
    assert session.verdicts() == {"test_it": "out of memory"}
    assert "hint: variant 'two devices' fits: 700.00 MiB of 1024.00 MiB reserved" in session.flat


def test_variants_are_not_tried_where_the_test_fits_or_does_not_ask(suite):
    session = run(
        suite,
        """
@pytest.mark.gpu_memory(max_gib=2, variants={"amp": {"per_sample": 5}})
def test_fits(gpu_memory):
    step(128, **gpu_memory.variant)

@pytest.mark.gpu_memory(max_gib=1, variants={"amp": True})
def test_does_not_ask():
    step(128)
""",
    )
    assert "log [128, 128, 128]" in session.out
    assert "hint: no variant was tried, because the test does not read gpu_memory.variant" in (
        session.flat
    )


def test_a_test_that_fails_with_another_batch_size_gets_no_advice(suite):
    check = '    assert gpu_memory.batch_size == 128, "a batch of its own"\n'
    session = run(suite, TEST.replace("    step", f"{check}    step"))
    assert session.verdicts() == {"test_it": "out of memory"}
    assert "accumulation" not in session.flat.replace("gradient accumulation", "")
    assert "a batch of its own" not in session.out


def test_the_budget_holds_for_tests_that_come_after_advice(suite):
    after = "\n@pytest.mark.gpu_memory\ndef test_next(): step(10)\n"
    session = run(suite, TEST + after)
    assert session.figures()["test_next"] == (200, 200)


def test_nothing_is_tried_where_nothing_is_to_be_explained(suite):
    body = """
@pytest.mark.gpu_memory(max_gib=1, batch_size=128, variants={"less": {"fixed": 1}})
def test_it(gpu_memory):
    step(gpu_memory.batch_size, **gpu_memory.variant)
"""
    session = run(suite, body, "--gpumem-attribution=off")
    assert session.verdicts() == {"test_it": "out of memory"}
    assert "log [128, 128]" in session.out  # the second without a limit
    assert "accumulation" not in session.flat.replace("gradient accumulation", "")
    assert "variant 'less'" not in session.flat
    assert "variant 'less'" in run(suite, body).flat


def test_the_advice_is_the_same_whatever_the_clock_says(suite, busy_clock):
    def hints(session):
        return [line for line in session.out.splitlines() if line.startswith("hint:")]

    at_once = hints(run(suite, TEST))
    busy_clock()
    assert hints(run(suite, TEST)) == at_once
    assert len(at_once) == 1


def test_where_the_search_is_cut_short_no_size_is_called_the_largest(suite, monkeypatch):
    monkeypatch.setattr("pytest_gpumem.explain.advice.MAX_TRIALS", 2)
    session = run(suite, TEST)
    assert "hint: batch size 64 fits" in session.flat
    assert "the largest batch size that fits" not in session.flat
    assert "steps make 128; 84 also fits; larger sizes were not tried" in session.flat
