"""Blocks by the source lines that allocated them, and by their modules."""

from pathlib import Path

import pytest

from pytest_gpumem.explain.sites import merged_paths, origin, sites, users_frame
from pytest_gpumem.source_lines import Line


def frame(filename, line=1, name="f"):
    return {"filename": filename, "line": line, "name": name}


def of(module, name):
    """A file in a package's folder."""
    return str(Path(module.__file__).parent / name)


def test_the_innermost_frame_outside_of_torch_is_the_users():
    import torch

    frames = [
        frame("<string>"),
        frame(of(torch, "nn/functional.py")),
        frame("/site/torchvision/models/resnet.py", 88),
        frame("/home/me/train.py"),
    ]
    assert users_frame(frames)["line"] == 88
    assert users_frame(frames[:2]) is None
    assert users_frame([]) is None


def test_a_decorator_s_frame_counts_where_there_is_no_other(tmp_path):
    path = tmp_path / "nvtx.py"
    path.write_text(
        "def mark(function):\n    def f(*a):\n        return function(*a)\n    return f\n"
    )
    decorator = frame(str(path), 3, "f")
    assert users_frame([decorator, frame("/home/me/train.py", 7)])["line"] == 7
    assert users_frame([decorator, frame("<string>")]) == decorator


def made(frames=(), line=None, **changes):
    options = {"module": "", "category": "activations", "nbytes": 10, **changes}
    return origin(frames, line, **options)


def test_without_frames_of_its_own_a_block_is_of_the_line_that_the_pass_began_with():
    assert made(line=Line("/home/me/train.py", 7, "step")).line == 7
    assert made([frame("/home/me/model.py", 3)], Line("/home/me/train.py", 7, "step")).line == 3
    assert made().filename == ""


def test_sites_add_up_the_blocks_of_a_line_and_category(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("class Net:\n    def forward(self, x):\n        return self.a(x)\n")
    here = [frame(str(path), 3, "forward")]
    found = sites(
        [
            made(here, module="Net.h.0.a"),
            made(here, module="Net.h.1.a"),
            made(here, category="temporaries", nbytes=100),
        ],
        tmp_path,
    )
    assert [(it.category, it.nbytes, it.blocks, it.module) for it in found] == [
        ("temporaries", 100, 1, ""),
        ("activations", 20, 2, "Net.h.*.a"),
    ]
    first = found[1]
    assert (first.path, first.line) == ("model.py", 3)
    assert (first.function, first.code) == ("Net.forward", "return self.a(x)")


@pytest.mark.parametrize(
    ("paths", "merged"),
    [
        (["A.b"], "A.b"),
        (["A.h.0.x", "A.h.11.x"], "A.h.*.x"),
        (["A.h.0.x", "A.h.0.y"], "A.h.0.*"),
        (["A.h.0", "A.h.0.y"], "A.h.0.*"),
        (["A.x", "B"], ""),
        ([""], ""),
    ],
)
def test_module_paths_are_merged(paths, merged):
    assert merged_paths(paths) == merged
