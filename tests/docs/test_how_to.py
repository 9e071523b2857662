"""The how-to guides are true: their programs run, and print what the pages show."""

import re

import pytest
from helpers.pages import Place, blocks, files, flat, read, shows
from helpers.warm import warm_python

FITS = "how-to/will-it-fit.md"
LEAKS = "how-to/find-leaks.md"
CARDS = "how-to/many-cards.md"
RANKS = "how-to/distributed.md"
SUITES = "how-to/existing-suites.md"
PARTS = "how-to/measuring-parts.md"
ACCELERATORS = "how-to/other-accelerators.md"
PROGRAMS = "how-to/outside-pytest.md"


@pytest.fixture
def narrow(suite, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    return suite


def write(suite, page, *names):
    for name in names:
        suite.write(name, files(page)[name])


# Find out what fits


def test_a_step_on_a_card(suite):
    write(suite, FITS, "test_card.py")
    assert suite.run("-v").verdicts() == {"test_step": "no baseline"}


def test_the_largest_size_is_what_the_page_shows(same_torch, suite):
    write(suite, FITS, "test_fits.py")
    session = suite.run("-s")
    assert session.ret == 0
    assert shows(session.out, blocks(FITS, "text")[0])


def test_the_limits_of_growth_hold_and_are_near(suite):
    write(suite, FITS, "test_growth.py")
    assert suite.run().ret == 0
    text = files(FITS)["test_growth.py"]
    suite.write("test_growth.py", text.replace("sample=41", "sample=39"))
    assert "over budget: memory per sample of 40.00 MiB" in suite.run().flat


def test_advice_is_given_as_the_page_shows(suite):
    source = """
        @pytest.mark.gpu_memory(max_gib=1, batch_size=128)
        def test_too_large(gpu_memory):
            tensors = [mib(100), mib(10 * gpu_memory.batch_size)]
            assert tensors
    """
    assert flat(blocks(FITS, "text")[1]) in suite.run(source=source).flat


def test_variants_are_tried_as_the_page_shows(same_torch, narrow):
    write(narrow, FITS, "test_variants.py")
    session = narrow.run()
    assert session.ret == 1
    assert shows(session.out, blocks(FITS, "text")[2])


def test_a_program_with_a_size_ends_as_the_page_says(tmp_path, virtual_gpu):
    place = Place(tmp_path / "project")
    place.write(
        "train.py",
        "import sys, torch\n"
        "torch.empty(int(sys.argv[2]) * 2**29, dtype=torch.uint8, device='cuda')\n",
    )
    largest, one = (line[2:] for line in blocks(FITS, "console")[0].splitlines())
    assert place.sh(largest).ret == 0
    assert place.sh(one).ret == 1  # 16 GiB on a T4
    place.write("train.py", "raise ValueError\n")
    assert place.sh(one).ret == 2


# Test on many cards


def test_the_table_of_cards_is_what_the_page_shows(suite):
    shown = blocks(CARDS, "text")[0]
    write(suite, CARDS, "test_it.py")
    out = suite.run().out
    assert shown in "\n".join(line.rstrip() for line in out.splitlines())


def test_the_option_takes_the_place_of_the_markers_cards(suite):
    write(suite, CARDS, "test_it.py")
    session = suite.run("--gpumem-cards=T4", "-k", "8 and not 18")
    assert session.outcomes == {"passed": 1, "deselected": 1}


def test_a_suite_for_small_and_large_gpus_is_skipped_as_the_page_shows(suite):
    suite.write("pyproject.toml", files(CARDS, "toml")["pyproject.toml"])
    write(suite, CARDS, "test_sizes.py")
    for command in blocks(CARDS, "console")[1].splitlines():
        assert suite.run(*command.removeprefix("$ pytest ").split()).ret == 0
    assert flat(blocks(CARDS, "text")[1]) in suite.run("--gpumem-card=T4", "-rs").flat


# Find leaks


def test_a_leak_is_reported_as_the_page_shows(same_torch, narrow):
    write(narrow, LEAKS, "test_leak.py")
    session = narrow.run()
    assert session.outcomes == {"passed": 1, "errors": 1}
    assert shows(session.out, blocks(LEAKS, "text")[0])


def test_a_full_cache_is_no_leak_with_warmup(suite):
    text = files(LEAKS)["test_leak.py"].replace("CACHE.append(", "CACHE or CACHE.append(")
    suite.write("test_leak.py", text)
    assert suite.run().outcomes == {"passed": 1, "errors": 1}
    suite.write("test_leak.py", text.replace("max_leak_mib=0", "max_leak_mib=0, warmup=1"))
    assert suite.run().outcomes == {"passed": 1}


def test_growing_steps_are_reported_as_the_page_shows(same_torch, narrow):
    write(narrow, LEAKS, "test_steps.py")
    session = narrow.run()
    assert session.ret == 1
    assert shows(session.out, blocks(LEAKS, "text")[1])


# Test a distributed run


def test_one_rank_of_many(suite):
    write(suite, RANKS, "test_rank.py")
    session = suite.run("-v")
    assert session.ret == 0
    whole = 4 * (4096 * 4096 + 4096) * 4 / 2**20
    assert session.figures()["test_one_rank"][0] > whole  # made whole, and sharded then


def test_the_page_names_an_example_that_is_there(suite):
    assert "fully_shard" in read("examples/test_distributed.py")


# Add memory tests to an existing suite


def test_the_nearest_marker_wins_field_by_field(suite):
    write(suite, SUITES, "test_models.py")
    session = suite.run("-v")
    assert session.outcomes == {"passed": 3}
    assert session.table["test_backward"]["budget"]
    assert not session.table["test_forward[16]"].get("budget")
    assert suite.run("--gpumem-update-baselines").ret == 0
    text = files(SUITES)["test_models.py"]
    suite.write(
        "test_models.py", text.replace("[16, 256]", "[16, 260]").replace("randn(64", "randn(65")
    )
    assert suite.run("-v", "-k", "backward").verdicts() == {"test_backward": "ok"}


def test_a_suite_that_asks_for_a_gpu_at_its_import(narrow):
    write(narrow, SUITES, "test_library.py")
    session = narrow.run()
    assert session.outcomes == {"skipped": 1}
    assert shows(session.out, blocks(SUITES, "text")[0])
    narrow.write("pyproject.toml", files(SUITES, "toml")["pyproject.toml"])
    assert narrow.run("-v").verdicts() == {"test_step": "no baseline"}


def test_parts_in_place_of_peaks_by_hand(suite):
    write(suite, SUITES, "test_offloading.py")
    assert suite.run().outcomes == {"passed": 1}
    text = files(SUITES)["test_offloading.py"]
    suite.write("test_offloading.py", text.replace("            block.cpu()\n", ""))
    assert "over at_most='0.5 * whole'" in suite.run().flat


def test_a_session_whose_conftest_loads_the_virtual_gpu(tmp_path, virtual_gpu):
    place = Place(tmp_path / "project")
    place.write("conftest.py", files(SUITES)["conftest.py"])
    place.write("test_it.py", "import torch\ndef test_it(): assert torch.cuda.is_available()\n")
    assert place.sh("pytest").ret == 0


def test_the_marker_is_registered_without_the_plugin(tmp_path, virtual_gpu):
    place = Place(tmp_path / "project")
    place.write("pyproject.toml", files(SUITES, "toml")["pyproject.toml#3"])
    place.write("test_models.py", files(SUITES)["test_models.py"].replace(".cuda()", ""))
    done = place.sh("pytest -p no:gpumem --strict-markers --collect-only -q")
    assert done.ret == 0, done.out


# Measure parts of a test, and outside pytest


def test_parts_have_rows_of_their_own(virtual_gpu, suite):
    write(suite, PARTS, "test_parts.py")
    session = suite.run("-v")
    assert session.ret == 0
    assert "(forward)" in session.out
    assert "(backward)" in session.out


def test_the_program_prints_what_its_comment_says(same_torch, suite):
    (program,) = blocks(PROGRAMS, "python")
    done = suite.python(program, python=warm_python())
    assert done.ret == 0, done.err
    assert done.out.strip() == re.search(r"# (\d+ \d+)$", program, re.MULTILINE)[1]


def test_a_program_is_run_as_it_is(tmp_path, virtual_gpu):
    place = Place(tmp_path / "project")
    place.write("train.py", "import torch\nx = torch.empty(2**20, device='cuda')\n")
    command, *gate = re.findall(r"^\$ (gpumem run .*)$", read(PROGRAMS), re.MULTILINE)
    done = place.sh(command)
    assert done.ret == 0, done.err
    for held in gate:
        place.sh(held)
    place.write("train.py", "import torch\nx = torch.empty(2**21, device='cuda')\n")
    grown = place.sh(gate[-1])
    assert (grown.ret, "+4.00 MiB  other  train.py:2" in grown.err) == (1, True), grown.err
    assert "gpumem: virtual GPU T4" in done.err
    assert "4.00 MiB" in done.err


def test_a_part_is_held_to_another_as_the_page_shows(suite):
    write(suite, PARTS, "test_checkpointing.py")
    assert suite.run().outcomes == {"passed": 1}
    text = files(PARTS)["test_checkpointing.py"]
    suite.write("test_checkpointing.py", text.replace("less_than=plain", 'less_than="0.1 * plain"'))
    assert "over budget: peak allocated of" in suite.run().flat


# Other accelerators than CUDA


def test_the_test_for_other_accelerators_runs_on_the_virtual_gpu_too(suite):
    """On another accelerator: devices/test_accelerator.py, with a step small enough to compute."""
    (source,) = blocks(ACCELERATORS, "python")
    session = suite.run(source=source)
    assert session.verdicts() == {"test_step": "no baseline"}
