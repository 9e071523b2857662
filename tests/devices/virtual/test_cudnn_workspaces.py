"""cuDNN's workspaces: those measured on real GPUs, what cuDNN is told, what it refuses."""

import ast
import csv
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import left_out
from helpers.paths import HELPERS, ROOT
from helpers.virtual_gpu import child, virtual_card

from pytest_gpumem.devices.cards import CARDS
from pytest_gpumem.devices.virtual.cudnn_notes import CUDNN_MARGIN, MIN_CUDNN, PLANS_KEPT
from pytest_gpumem.report.json_report import read_report
from pytest_gpumem.sizes import format_size

DATA = ROOT / "benchmarks/data/measured-workspaces.csv"
"""exact bytes of what an operator took besides its output, by GPU, torch and cuDNN"""

with DATA.open(encoding="utf-8") as lines:
    MEASURED = [row for row in csv.DictReader(lines) if row["operator"] == "aten::convolution"]

CHIPS = {
    # NVIDIA's data sheets: SMs of a chip whose other limits a profile has
    "NVIDIA GeForce RTX 3090 Ti": replace(CARDS["RTX A6000"], sm_count=84),
    "NVIDIA RTX PRO 5000 72GB Blackwell": replace(CARDS["RTX 5090"], sm_count=110),
}
OTHERWISE = {
    ("conv-fp32-n2-c64-h128-k64.rtx3090ti.torch-2.12.1.cuda-13.0", version)
    for version in (92400, 92600)
}
"""rows for which that cuDNN ranks another engine first than the row's version did"""


def workspace(torch, images, weights, dtype=None):
    """Run a convolution as the rows' operator; return the bytes that it took besides its output."""
    x = torch.zeros(images, dtype=dtype, device="cuda")
    w = torch.zeros(weights, dtype=dtype, device="cuda")
    torch.cuda.empty_cache()  # the workspace gets a segment of its own
    torch.cuda.reset_peak_memory_stats()
    y = torch.nn.functional.conv2d(x, w, padding=1)
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del y
    return taken


def skip_without_cudnn(device):
    """Skip where the installed cuDNN is too old to be asked, once it was to be."""
    if 0 < device.library.cudnn_found() < MIN_CUDNN:
        pytest.skip(f"cuDNN {device.library.cudnn_found()} cannot be asked")


@pytest.mark.parametrize("row", MEASURED, ids=[row["id"] for row in MEASURED])
def test_workspaces_are_those_measured_on_real_gpus(row):
    left_out.need_cudnn()
    with virtual_card(CHIPS[row["gpu"]]) as device:
        import torch

        dtype = getattr(torch, ast.literal_eval(row["dtypes"])[0].removeprefix("torch."))
        found = workspace(torch, *ast.literal_eval(row["shapes"]), dtype)
        skip_without_cudnn(device)
        assert device.notes(Path()) == []
        torch.cuda.empty_cache()
    if (row["id"], device.library.cudnn_found()) in OTHERWISE:
        assert 0 < found < int(row["bytes"])
    else:
        assert found == int(row["bytes"])


@pytest.mark.parametrize("card", ["RTX 4090", "A100-80GB", "H100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_convolution_of_1x1_is_a_product_of_cublaslt_without_workspace(card, dtype):
    """An RTX 4090 took none for it in 20 published peaks (vae-peaks.csv); other engines copy."""
    with virtual_card(card) as device:
        import torch

        x = torch.zeros(1, 512, 64, 64, dtype=getattr(torch, dtype), device="cuda")
        w = torch.zeros(512, 512, 1, 1, dtype=getattr(torch, dtype), device="cuda")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        y = torch.nn.functional.conv2d(x, w)
        taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        skip_without_cudnn(device)
        del x, w, y
        torch.cuda.empty_cache()
    assert taken == 0


CONV = """
    @pytest.mark.gpu_memory
    def test_conv():
        x = torch.zeros(2, 64, 128, 128, device="cuda")
        torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda")(x).sum().backward()

    @pytest.mark.gpu_memory
    def test_small():
        torch.nn.Conv2d(4, 4, 3, device="cuda")(torch.zeros(1, 4, 8, 8, device="cuda"))
"""
TWO_CARDS = """
    @pytest.mark.gpu_memory(card=["RTX A6000", "RTX 5090"])
    def test_conv(gpu_memory):
        x = torch.zeros(4, 128, 64, 64, device="cuda")
        w = torch.zeros(128, 128, 3, 3, device="cuda")
        torch.cuda.empty_cache()
        y = torch.nn.functional.conv2d(x, w, padding=1)
        taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        print("took", torch.cuda.get_device_name(), taken)
"""
"""real GPUs of these capabilities took 8,978,944 and 17,367,552 bytes for it (MEASURED)"""


def apart(suite, monkeypatch, *args, source, **environment):
    """Run a session in a process of its own, which has asked cuDNN for nothing so far."""
    monkeypatch.delenv(PLANS_KEPT, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return suite.run_warm("-v", *args, source=source)


def test_a_session_of_two_cards_has_the_workspaces_of_each(suite, monkeypatch):
    left_out.need_cudnn()
    with virtual_card() as device:
        skip_without_cudnn(device)
    session = apart(suite, monkeypatch, "-s", source=TWO_CARDS)
    assert session.outcomes == {"passed": 2}
    assert "took NVIDIA RTX A6000 8978944" in session.out
    assert "took NVIDIA GeForce RTX 5090 17367552" in session.out
    assert "another card" not in session.flat


def test_a_workspace_of_another_card_is_not_passed_over_in_silence(suite, monkeypatch):
    left_out.need_cudnn()
    with virtual_card() as device:
        skip_without_cudnn(device)
    session = apart(suite, monkeypatch, "-s", source=TWO_CARDS, **{PLANS_KEPT: "100"})
    assert session.out.count("8978944") == 2
    note = "note: cuDNN's plans ran with workspaces for another card"
    assert f"{note}, because PyTorch keeps plans" in session.flat
    assert "(1 test)" in session.flat


def test_cards_of_the_same_chip_have_the_same_plans(suite, monkeypatch):
    source = TWO_CARDS.replace("RTX A6000", "H100").replace("RTX 5090", "H200")
    session = apart(suite, monkeypatch, source=source, **{PLANS_KEPT: "100"})
    assert session.outcomes == {"passed": 2}
    assert "another card" not in session.flat


def test_nothing_is_to_be_said_of_convolutions_that_were_asked_for(suite):
    left_out.need_cudnn()
    with virtual_card() as device:
        skip_without_cudnn(device)
    assert "cuDNN" not in suite.run("-v", source=CONV).flat


RANGED = """
    def conv(side, gradient=True):
        x = torch.zeros(2, 64, side, side, device="cuda")
        layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda")
        with torch.set_grad_enabled(gradient):
            y = layer(x)
        if gradient:
            y.sum().backward()

    @pytest.mark.gpu_memory
    def test_gradient():
        conv(128)

    @pytest.mark.gpu_memory(max_reserved_gib=0.032)
    def test_limit():
        conv(128, gradient=False)

    @pytest.mark.gpu_memory(max_gib=0.032)
    def test_cap():
        conv(128, gradient=False)

    @pytest.mark.gpu_memory
    def test_sums():
        layer = torch.nn.Conv2d(512, 128, 3, padding=1, bias=False, device="cuda")
        with torch.no_grad():
            layer(torch.zeros(1, 512, 64, 64, device="cuda"))

    @pytest.mark.gpu_memory
    def test_none():
        torch.zeros(2**20, device="cuda")
"""
"""the least that a convolution may take is nothing, the most are copies of its tensors, and partial
sums of 768 products where there are more of those than results"""


def test_workspaces_that_are_not_asked_for_have_a_range(suite, monkeypatch):
    session = apart(suite, monkeypatch, "--gpumem-json=r.json", source=RANGED, GPUMEM_CUDNN="none")
    measured = {
        result.nodeid.partition("::test_")[2]: result.measurement
        for result in read_report(suite.path / "r.json").results
    }
    # Limits are held to the largest. At a cap PyTorch takes a plan that fits.
    assert session.outcomes == {"passed": 4, "failed": 1}
    assert "peak reserved of 50.00 MiB at most is" in session.flat
    tensor, filters, plan = 2 * 64 * 128 * 128 * 4, 64 * 64 * 9 * 4, 512
    peak, spanned = measured["limit"].peaks[0], measured["limit"].range
    assert peak.allocated == 2 * tensor + filters  # as none is taken
    high = peak.allocated + 2 * tensor + filters + plan
    assert (spanned.least[0].allocated, spanned.most[0].allocated) == (peak.allocated, high)
    assert spanned.least[0].reserved == spanned.least[0].allocated
    assert spanned.most[0].reserved == 40 * 2**20 * (100 + CUDNN_MARGIN) // 100
    assert spanned.judged
    cap = int(0.032 * 2**30)
    assert (measured["cap"].range.most[0].allocated, measured["cap"].peaks) == (cap, (peak,))
    images, results = 512 * 64 * 64 * 4, 128 * 64 * 64 * 4
    filters, sums = 512 * 128 * 9 * 4, results * 512 * 9 // 768
    span = measured["sums"].range.most[0].allocated - measured["sums"].peaks[0].allocated
    assert span == images + filters + sums + plan
    assert measured["none"].range is None
    # Of a filter's gradient, too, there are partial sums.
    most = 2 * tensor + 2 * 64 * 128 * 128 * 64 * 9 // 768 * 4 + plan
    assert (
        "note: cuDNN did not compute the workspaces of convolutions, so a prediction does not"
        in session.flat
    )
    says = "copies of a convolution's tensors and partial sums of its result, here"
    assert f"{says} {format_size(most)} or less" in session.flat
    reason = "the workspaces of convolutions, which cuDNN did not compute"
    assert f"{reason}; the largest figures are compared with limits" in session.flat


BENCHMARK = """
    torch.backends.cudnn.benchmark = True

    def step(gpu_memory, name):
        x = torch.zeros(16, 32, 26, 26, device="cuda")
        w = torch.zeros(64, 32, 3, 3, device="cuda")
        with gpu_memory.measure(name):
            torch.nn.functional.conv2d(x, w)

    @pytest.mark.gpu_memory(card="RTX A6000")
    def test_steps(gpu_memory):
        for name in ("first", "second", "third"):
            step(gpu_memory, name)

    @pytest.mark.gpu_memory(card="RTX A6000")
    def test_another(gpu_memory):
        step(gpu_memory, "first")

    @pytest.mark.gpu_memory(card="RTX A6000", max_gib=0.023)
    def test_small(gpu_memory):
        step(gpu_memory, "first")

    @pytest.mark.gpu_memory(card="RTX A6000", steady=True)
    def test_steady(gpu_memory):
        for _ in range(5):
            step(gpu_memory, "first")
            gpu_memory.step()
"""


def test_benchmark_mode_has_a_range(suite, monkeypatch):
    left_out.need_cudnn()
    with virtual_card() as device:
        skip_without_cudnn(device)
    session = apart(suite, monkeypatch, "--gpumem-json=r.json", source=BENCHMARK)
    assert session.outcomes == {"passed": 4}
    report = read_report(suite.path / "r.json")
    measured = {
        (result.nodeid.partition("::")[2], result.part): result.measurement
        for result in report.results
    }
    first, second, third = (measured["test_steps", part] for part in ("first", "second", "third"))
    whole = measured["test_steps", ""]
    # PyTorch allocates the largest workspace once, to time the plans.
    assert first.peaks[0].allocated > second.peaks[0].allocated
    assert second.peaks == third.peaks
    assert first.range.least == second.range.least
    for part in (whole, first, second):
        low, high = part.range.least[0], part.range.most[0]
        assert low.allocated == low.reserved < high.allocated == part.peaks[0].allocated
        # A GPU's mixture of plans splits segments in an order that neither run has.
        assert high.reserved == part.peaks[0].reserved * 125 // 100
        ends = f"allocated {format_size(low.allocated)} to {format_size(high.allocated)}"
        assert any(note.startswith(ends) for note in part.note_texts)
    assert (
        "cuDNN's choice in benchmark mode; the largest figures are compared with limits"
        in session.flat
    )
    # Each test finds its plans anew: alone or after others, its figures are the same.
    assert measured["test_another", "first"].peaks == first.peaks
    # PyTorch tries no plan for which there is no room.
    assert measured["test_small", ""].peaks[0].reserved < whole.peaks[0].reserved
    assert measured["test_steady", ""].range is None
    assert "torch.backends.cudnn.benchmark is on: the fastest cuDNN plan is unknown" in session.flat


def test_a_library_that_is_not_there_is_said(suite, monkeypatch, capfd):
    session = apart(suite, monkeypatch, "-s", source=CONV, GPUMEM_CUDNN="/nowhere/libcudnn.so.9")
    assert session.outcomes == {"passed": 2}
    assert "note: cuDNN did not compute the workspaces of convolutions" in session.flat
    said = capfd.readouterr().err
    assert said.count("GPUMEM_CUDNN: /nowhere/libcudnn.so.9: cannot open") == 1
    assert "give the path of a libcudnn.so.9, or none" in said


ATTENTION = """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    @pytest.mark.gpu_memory(card="A100-80GB")
    def test_attention():
        q = torch.zeros(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.cuda.reset_peak_memory_stats()
        out.backward(torch.zeros_like(out))
        print("took", torch.cuda.max_memory_allocated())
"""


def took(session):
    """Return the bytes that a session's test says it took."""
    return int(re.search(r"took (\d+)", session.out)[1])


def test_attention_that_was_not_asked_for_is_not_taken_for_a_convolution(suite, monkeypatch):
    session = apart(suite, monkeypatch, source=ATTENTION, GPUMEM_CUDNN="none")
    assert session.outcomes == {"passed": 1}
    assert "note: predictions do not include the workspaces of cuDNN's attention" in session.flat
    assert "convolution's" not in session.flat


def test_attentions_workspace_is_the_one_that_cudnn_names(suite, monkeypatch):
    left_out.need_cudnn()
    with virtual_card() as device:
        skip_without_cudnn(device)
    session = apart(suite, monkeypatch, "-s", source=ATTENTION)
    assert session.outcomes == {"passed": 1}
    assert "predictions do not include" not in session.flat
    without = apart(suite, monkeypatch, "-s", source=ATTENTION, GPUMEM_CUDNN="none")
    sums = 2 * 8 * 256 * 64 * 4  # of dQ's parts, in float32: 9.10 to 9.26 want them and 128 bytes
    assert took(session) - took(without) == sums + 512


def test_fused_convolutions_are_asked_for(torch):
    left_out.need_cudnn()
    with virtual_card("A100-80GB") as device:
        x = torch.zeros(2, 64, 28, 28, device="cuda", dtype=torch.half)
        w = torch.zeros(64, 64, 3, 3, device="cuda", dtype=torch.half)
        bias = torch.zeros(64, device="cuda", dtype=torch.half)
        x, w = (it.contiguous(memory_format=torch.channels_last) for it in (x, w))
        before = device.library.convolutions()
        y = torch.cudnn_convolution_relu(x, w, bias, [1, 1], [1, 1], [1, 1], 1)
        skip_without_cudnn(device)
        after = device.library.convolutions()
        assert (after.unknown - before.unknown, after.asked - before.asked) == (0, 1)
        del x, w, y, bias


# -- what cuDNN is told, by a stand-in that writes it down --

STAND_IN = HELPERS / "stand_in_cudnn.c"
PROGRAM = """
    import json, torch
    from pathlib import Path
    from pytest_gpumem.devices.virtual.device import VirtualDevice

    x = torch.zeros(2, 4, 8, 8, device="cuda")
    w = torch.zeros(4, 4, 3, 3, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    try:
        y = torch.nn.functional.conv2d(x, w)
        said = ""
    except RuntimeError as error:
        y, said = None, str(error)
    device = VirtualDevice.loaded()
    library, notes = device.library, [note.text for note in device.notes(Path())]
    ran = library.convolutions()
    reason = device.alternatives().reason
    taken = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    version = torch._C._cudnn.getRuntimeVersion()
    found = library.cudnn_found()
    ends = []
    for end in ("least", "most") if y is not None else ():
        device.gpu_choices.assume_sizes(end)
        del y
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        y = torch.nn.functional.conv2d(x, w)
        ends.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
    print(json.dumps([taken, ran.unknown, ran.asked, found, said or notes, version, ends, reason]))
"""


def with_stand_in(folder, *defines, card="A100-80GB"):
    """Run a convolution over the stand-in; return what came of it and what it was told."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler built the virtual GPU"
    library, log = folder / "libcudnn.so.9", folder / "log"
    flags = [f"-D{it}" for it in defines]
    subprocess.run(
        [compiler, "-shared", "-fPIC", *flags, str(STAND_IN), "-o", str(library)], check=True
    )
    variables = {"GPUMEM_CUDNN": str(library), "STAND_IN_LOG": str(log)}
    out = child(PROGRAM, card=card, warm=True, **variables)
    return json.loads(out), log.read_text().splitlines() if log.exists() else []


def test_cudnn_is_told_of_the_card_and_of_no_device(tmp_path):
    answers, told = with_stand_in(tmp_path)
    taken, unknown, asked, found, notes, _, ends, reason = answers
    # It is not the cuDNN of this torch, whose workspace may be any of a range.
    assert ends == [0, 1_000_448]
    assert "which cuDNN 9.10.2 computed in place of torch's own" in reason
    assert (taken, unknown, asked, found) == (1_000_448, 0, 1, 91002)  # 1,000,000, in units of 512
    card = CARDS["A100-80GB"]
    said = json.loads(next(line for line in told if line.startswith("device ")).partition(" ")[2])
    limits = card.limits
    assert (
        said.items()
        >= {
            "deviceVer": 800,
            "multiProcessorCount": card.sm_count,
            "maxSharedMemoryPerBlock": limits.shared_memory_per_block,
            "maxSharedMemoryPerBlockOptin": limits.shared_memory_per_block_optin,
            "reservedSharedMemoryPerBlock": limits.reserved_shared_memory_per_block,
            "maxThreadsPerSM": limits.max_threads_per_sm,
            "maxCtasPerSM": limits.max_blocks_per_sm,
            "totalGlobalMem": card.total_memory,
            "l2CacheSize": card.l2_cache_size,
        }.items()
    )
    assert notes[0].startswith(
        "cuDNN 9.10.2 (GPUMEM_CUDNN) computed the workspaces of convolutions: torch's"
    )
    # CUDA_ERROR_NO_DEVICE while it is asked, and the real NVRTC, where there is one
    nvrtc = "NVRTC 0, some 1" if left_out.has("libnvrtc") else "NVRTC 11, some 0"
    assert f"devices 0, cuInit 100, {nvrtc}" in told
    assert [line for line in told if line.endswith(" as 0")] == []  # no handle
    # the device property, in heuristics (204 of 4) and in the plan (407 of 5), as a descriptor
    assert {"set 204 of 4 as 15", "set 407 of 5 as 15"} <= set(told)


def test_pytorch_sees_the_version_that_is_asked(tmp_path):
    """It decides by cuDNN's version at run time what it sends there, not by its own headers'."""
    assert with_stand_in(tmp_path, "VERSION=99001")[0][5] == [9, 90, 1]


def test_pytorch_sees_no_version_that_it_would_refuse(tmp_path):
    """``torch.backends.cudnn.version()`` raises where cuDNN is older than PyTorch's headers."""
    import torch

    compiled = list(torch._C._cudnn.getCompileVersion())
    assert with_stand_in(tmp_path, "VERSION=90800")[0][5] == max(compiled, [9, 8, 0])


def test_a_card_that_cudnn_refuses_is_not_asked_about(tmp_path):
    (taken, unknown, asked, *_), _ = with_stand_in(tmp_path, "REFUSED=38")
    assert (taken, unknown, asked) == (0, 1, 0)


def test_what_cudnn_refuses_is_refused(tmp_path):
    (_, unknown, asked, _, said, *_), _ = with_stand_in(tmp_path, "REFUSED=5")
    assert (unknown, asked) == (0, 0)
    assert "engine" in said or "plan" in said.lower()


def test_a_plan_whose_kernel_cudnn_would_compile_is_not_made(tmp_path):
    """Its workspace is that of the engine's configuration; compiling takes most of a second."""
    (taken, unknown, asked, *_), told = with_stand_in(tmp_path, "COMPILED=2000000")
    assert (taken, unknown, asked) == (2_000_384, 0, 1)  # in units of 512
    assert "set 407 of 5 as 15" not in told


def test_an_older_cudnn_is_not_asked(tmp_path):
    answers, told = with_stand_in(tmp_path, "VERSION=90701")
    taken, unknown, asked, found, notes, _, ends, _ = answers
    size = 4 * (2 * 4 * 8 * 8 + 4 * 4 * 9 + 2 * 4 * 6 * 6) + 512
    assert ends == [0, -(-size // 512) * 512]
    assert (taken, unknown, asked, found) == (0, 1, 0, 90701)
    assert told == []
    assert notes[0].startswith(
        "cuDNN 9.7.1 cannot compute the workspaces of convolutions here (9.8 and later can; "
        "9.19.0, named in GPUMEM_CUDNN, was nearest to published runs), so a prediction does not"
    )


def test_a_cudnn_of_another_cuda_is_not_asked(tmp_path):
    (taken, unknown, asked, found, notes, *_), told = with_stand_in(tmp_path, "CUDA=11080")
    assert (taken, unknown, asked, found, told) == (0, 1, 0, 0, [])
    assert notes[0].startswith("cuDNN did not compute the workspaces of convolutions")


OLDER_FIRST = """
    @pytest.mark.gpu_memory(card="T4")
    def test_older():
        x, w = torch.zeros(32, 64, 56, 56, device="cuda"), torch.zeros(64, 64, 1, 1, device="cuda")
        torch.nn.functional.conv2d(x, w)

    @pytest.mark.gpu_memory(card="RTX 3090")
    def test_newer():
        x = torch.zeros(4, 128, 64, 64, device="cuda")
        torch.nn.functional.conv2d(x, torch.zeros(128, 128, 3, 3, device="cuda"), padding=1)
"""


def test_a_card_has_its_workspaces_whatever_card_was_before_it_in_the_process(suite, monkeypatch):
    """cuDNN keeps something of a first 1x1 convolution that was planned for a card without TF32."""
    with virtual_card() as device:
        skip_without_cudnn(device)
    alone = apart(suite, monkeypatch, "-k", "newer", source=OLDER_FIRST).figures()["test_newer"]
    after = apart(suite, monkeypatch, source=OLDER_FIRST).figures()["test_newer"]
    assert after == alone
