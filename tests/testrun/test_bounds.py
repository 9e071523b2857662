"""Limits of parts on other figures than peak allocated, below, and in order."""

import json

import pytest

PARTS = """
@pytest.mark.gpu_memory(baseline=False)
def test_it(gpu_memory):
    with gpu_memory.measure("load") as load:
        weights = mib(100)
    with gpu_memory.measure("offload"{offload}) as offload:
        {work}
    {after}
"""


def run(suite, offload="", work="pass", after="pass", *args):
    offload = offload and f", {offload}"
    return suite.run(*args, source=PARTS.format(offload=offload, work=work, after=after))


@pytest.mark.parametrize(
    ("offload", "work", "failure"),
    [
        ("figure='held', at_most='before'", "mib(40)", ""),
        ("figure='held', at_most='before - 100MiB'", "del weights", ""),
        (
            "figure='held', at_most='before - 100MiB'",
            "pass",
            (
                "over budget: held memory of 100.00 MiB is 100.00 MiB over "
                "at_most='before - 100.00 MiB', figure='held' (0 B)"
            ),
        ),
        (
            "figure='held', less_than='before + 40MiB'",
            "kept = mib(40)",
            "over budget: held memory of 140.00 MiB is",
        ),
        ("at_most='before + 40MiB'", "mib(40)", ""),
        (
            "at_most='before + 39MiB'",
            "mib(40)",
            (
                "over budget: peak allocated of 140.00 MiB is 1.00 MiB over "
                "at_most='before + 39.00 MiB' (139.00 MiB)"
            ),
        ),
        ("figure='reserved', at_most='before + 64MiB'", "mib(64)", ""),
        (
            "figure='reserved', at_most='1.5 * load'",
            "mib(64)",
            (
                "over budget: peak reserved of 164.00 MiB is 14.00 MiB over "
                "at_most='1.5 * load', figure='reserved' (150.00 MiB)"
            ),
        ),
        ("at_least='100MiB', at_most='160MiB'", "mib(60)", ""),
        (
            "at_least='100MiB', at_most='150MiB'",
            "mib(60)",
            "over budget: peak allocated of 160.00 MiB is 10.00 MiB over at_most='150.00 MiB'",
        ),
        (
            "at_least='2 * load'",
            "mib(60)",
            (
                "under limit: peak allocated of 160.00 MiB is 40.00 MiB under at_least='2 * load' "
                "(200.00 MiB)"
            ),
        ),
        ("figure='held', more_than=0.99, of=load", "mib(1)", ""),
        (
            "figure='held', more_than=load",
            "mib(1)",
            "under limit: held memory of 100.00 MiB is as much as more_than='load'",
        ),
    ],
)
def test_a_part_is_held_to_its_limits(suite, offload, work, failure):
    session = run(suite, offload, work)
    assert session.outcomes == {"failed" if failure else "passed": 1}
    assert failure in session.flat


def test_memory_that_another_stream_may_still_use_is_active(suite):
    """While a graph is captured, no event tells that the other stream is done.

    PyTorch's own stream of captures may be any of its 32, the side stream too.
    """
    work = """side, capturing = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=capturing):
            x = mib(50)
            x.record_stream(side)
            del x
            mib(50)"""
    session = run(suite, "figure='active', at_most='before + 50MiB'", work)
    assert session.outcomes == {"failed": 1}
    assert "over budget: peak active of 200.00 MiB is 50.00 MiB over at_most=" in session.flat
    assert run(suite, "at_most='before + 50MiB'", work).outcomes == {"passed": 1}


def test_the_block_gives_its_figures(suite):
    after = (
        "assert (load.held_before, load.held, load.peak_active) == (0, 100 << 20, 100 << 20)\n"
        "    assert (offload.held_before, offload.held) == (100 << 20, 0)\n"
        "    assert offload.peak_active == 120 << 20"
    )
    assert run(suite, "", "mib(20); del weights", after).outcomes == {"passed": 1}


@pytest.mark.parametrize("relation", ["at_most='before'", "at_most=load"])
def test_lines_of_the_peak_are_no_cause_of_held_memory(suite, relation):
    """Nor is the memory that was reserved before the part a cause of it."""
    work = "kept = [mib(500), mib(120)][1]"
    session = run(suite, f"figure='held', {relation}", work)
    assert "over budget: held memory of 220.00 MiB is 120.00 MiB over" in session.flat
    assert "test_it.py:4 in mib" not in session.flat
    work = "del weights"
    session = run(suite, "at_least='800MiB'", work).flat
    assert "under limit: peak allocated of 100.00 MiB is 700.00 MiB under" in session
    assert "the allocator had reserved" not in session


HINTED = """
@pytest.mark.gpu_memory(baseline=False)
def test_trains(gpu_memory):
    layers = [torch.nn.Linear(1024, 1024, device="cuda") for _ in range(20)]
    model, x = torch.nn.Sequential(*layers), torch.zeros(8192, 1024, device="cuda")
    with gpu_memory.measure("steps", figure={figure!r}, at_most="before + 1MiB"):
        sgd = torch.optim.SGD(model.parameters())
        for _ in range(3):
            loss = model(x).sum()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
"""


def test_hints_of_the_peak_are_none_of_held_memory(suite):
    for figure, count in (("allocated", 1), ("held", 0)):
        source = HINTED.format(figure=figure)
        session = suite.run("--gpumem-attribution=on", source=source)
        assert session.verdicts()["test_trains (steps)"] == "over budget"
        assert session.flat.count("were still allocated at the peak") == count, session.out


CHAIN = """
@pytest.mark.gpu_memory(baseline=False)
def test_chain(gpu_memory):
    for name, size in (("leaf level", 10), ("block", 40), ("whole", {whole})):
        with gpu_memory.measure(name):
            mib(size)
    gpu_memory.ordered("leaf level < block<=whole")
"""


def test_an_order_of_parts_is_read_in_one_sentence(suite):
    assert suite.run(source=CHAIN.format(whole=40)).outcomes == {"passed": 1}
    session = suite.run("--gpumem-json=r.json", source=CHAIN.format(whole=30))
    assert session.outcomes == {"failed": 1}
    sentence = (
        "under limit: 'leaf level < block <= whole' does not hold: leaf level 10.00 MiB, "
        "block 40.00 MiB, whole 30.00 MiB"
    )
    assert f"part whole: {sentence}" in session.flat
    assert "next: find the lines that differ from block's" in session.flat
    results = json.loads((suite.path / "r.json").read_text())["results"]
    assert [it["verdict"]["kind"] for it in results if it["verdict"]["failed"]] == ["under limit"]


@pytest.mark.parametrize(
    ("offload", "after", "words"),
    [
        ("figure='heap', at_most='load'", "", "figure='heap'): there is no such figure; write one"),
        ("figure='held'", "", "figure='held'): figure= needs a limit; write at_most=1.1 as well"),
        ("at_least='lots'", "", "this names no part that was measured before (measured: 'load')"),
        (
            "more_than=5",
            "",
            "this number names no part to compare with; write for example more_than=",
        ),
        (
            "at_least=-1, of=load",
            "",
            "at_least must be a number above 0; write for example at_least=",
        ),
        ("at_least=True", "", "this is not a part that was measured before (measured: 'load')"),
        (
            "figure=3, at_most=load",
            "",
            "figure=3): there is no such figure; write one of 'allocated'",
        ),
        (
            "figure='held', of='load'",
            "",
            "of='load'): of= needs a limit; write at_most=1.1 as well",
        ),
        ("", "gpu_memory.ordered('load < unload')", "no parts that were measured: 'unload'"),
        ("", "gpu_memory.ordered('load')", "this is no order of parts; write for example"),
        ("", "gpu_memory.ordered(3)", "gpu_memory.ordered(3): this is no order of parts"),
        ("", "gpu_memory.ordered('load < offload', figure='x')", "there is no such figure"),
    ],
)
def test_a_mistake_is_one_tests_error(suite, offload, after, words):
    session = run(suite, offload, "pass", after or "pass")
    assert session.outcomes == {"failed": 1}
    assert words in session.flat
