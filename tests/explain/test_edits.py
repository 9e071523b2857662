"""What changed leads: lines that were edited since the baseline's commit."""

from __future__ import annotations

import re
import sys

import pytest
from helpers.git import commit, git
from helpers.planted_holders import EDITED

from pytest_gpumem.explain.lead import edit_words
from pytest_gpumem.explain.source_changes import edits_of_patch

UPDATE = "--gpumem-update-baselines"
MODEL = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x))))
"""
STEP = """
    import sys
    sys.modules.pop("model", None)  # each session of this process imports the file anew
    from model import Block

    @pytest.mark.gpu_memory
    def test_step():
        model = Block(256).cuda()
        model(torch.ones(8192, 256, device="cuda")).sum().backward()
"""


@pytest.fixture(autouse=True)
def _forgotten():
    """Other tests of this process have a module of that name too."""
    yield
    sys.modules.pop("model", None)


@pytest.fixture
def committed(suite):
    """A repository with a model in one file, its test in another, and the baseline."""
    suite.write("model.py", MODEL)
    suite.run(UPDATE, source=STEP)
    git("init", "-q")
    commit("A model and its baseline")
    return suite


def lead(session):
    """The first clause of a failure."""
    return session.flat.partition("regressed: ")[2].partition("; peak ")[0]


def widened(suite):
    """Make the layer wider, with edits beside that do nothing."""
    text = MODEL.replace("(width, 4 *", "(width, 8 *").replace("(4 * width,", "(8 * width,")
    text = text.replace("def __init__", '"""Of one width."""\n        def __init__')
    suite.write("model.py", text.replace("nn.LayerNorm(width)", "nn.LayerNorm(width, eps=1e-5)"))


def test_the_line_that_makes_a_wider_layer_leads_though_it_allocates_nothing(committed):
    widened(committed)
    assert lead(committed.run()) == "model.py:9 changed: 4 * width -> 8 * width"
    commit("Wider")  # it is the baseline's commit that counts, and not the last one
    assert lead(committed.run("-v")) == "model.py:9 changed: 4 * width -> 8 * width"


OUTER = """
    class Outer(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.block = Block(width)

        def forward(self, x):
            return x + self.block(x)
"""


def test_a_line_that_calls_the_wider_module_is_farther_than_the_one_that_makes_it(suite):
    suite.write("model.py", MODEL + OUTER)
    step = STEP.replace("Block", "Outer")
    suite.run(UPDATE, source=step)
    git("init", "-q")
    commit("A model and its baseline")
    edited = MODEL.replace("(width, 4 *", "(width, 8 *").replace("(4 * width,", "(8 * width,")
    suite.write("model.py", edited + OUTER.replace("x + self.block(x)", "self.block(x) + x"))
    words = "model.py:8 changed: 4 * width -> 8 * width (the nearest of 2 edits)"
    assert lead(suite.run(source=step)) == words


def test_without_a_committed_baseline_the_line_that_grew_leads(committed):
    widened(committed)
    for path in committed.path.glob("baselines/*/*.json"):
        path.write_text(path.read_text() + "\n")
    assert lead(committed.run()).endswith(" at test_it.py:13 (test_step)")


def test_where_a_shallow_clone_ends_nothing_is_said_of_edits(committed):
    widened(committed)
    commit("Wider")
    (committed.path / ".git/shallow").write_text(git("rev-list", "--max-parents=0", "HEAD"))
    assert lead(committed.run()).endswith(" at test_it.py:13 (test_step)")


def test_where_a_shallow_clone_ends_an_edited_line_leads_and_others_are_not_known(committed):
    text = STEP.replace("torch.ones(8192", "torch.ones(16384")
    committed.write("test_it.py", text)
    commit("Larger")
    (committed.path / ".git/shallow").write_text(git("rev-list", "--max-parents=0", "HEAD"))
    words = "test_it.py:13 changed: 8192 -> 16384 (other edits are not known)"
    assert lead(committed.run(source=text)) == words


def test_an_edit_elsewhere_is_no_cause(committed):
    committed.write("other.py", "def f():\n    return 1")
    commit("Another file")
    committed.write("other.py", "def f():\n    return 2")
    text = STEP.replace("torch.ones(8192", "torch.ones(16384")
    session = committed.run(source=text)
    assert lead(session) == "test_it.py:13 changed: 8192 -> 16384 (the nearest of 2 edits)"
    revision = git("log", "-1", "--format=%h", "--abbrev=12", "--", "baselines").strip()
    assert (
        f"or find out which edit it was:\n    gpumem blame {revision} test_it.py::test_step\n"
        in session.out
    )


def test_a_file_that_the_test_does_not_run_has_no_cause(committed):
    committed.write("other.py", "def up(x):\n    return x")
    commit("Another file, in whose last lines the names of the model stand")
    widened(committed)
    committed.write("other.py", "def up(x):\n    self.up = x\n    return x")
    words = "model.py:9 changed: 4 * width -> 8 * width (the nearest of 2 edits)"
    assert lead(committed.run()) == words


def test_an_edit_that_the_growth_does_not_pass_is_not_named(suite):
    """A batch is larger by a line of no function: the line that grew leads."""
    model = MODEL + "\n    def count(model):\n        return 1\n"
    step = STEP.replace("    @pytest", "    ROWS = 8192\n\n    @pytest").replace(
        "ones(8192", "ones(ROWS"
    )
    suite.write("model.py", model)
    suite.run(UPDATE, source=step)
    git("init", "-q")
    commit("A model and its baseline")
    suite.write("model.py", model.replace("return 1", "return 2"))
    session = suite.run(source=step.replace("ROWS = 8192", "ROWS = 16384"))
    assert lead(session).endswith(" at test_it.py:15 (test_step)")
    assert "gpumem blame " in session.out


RECONSTRUCT = """
    @pytest.mark.gpu_memory
    def test_it():
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
        x = torch.rand(8192, 1024, device="cuda")
        with torch.no_grad():  # {comment}
            output = model(x)  # {comment}
        del output
"""
BLAME = "or find out which edit it was:\n    gpumem blame "


def after_an_edit(suite, before, after):
    """The session of a test whose source was edited since its baseline."""
    suite.run(UPDATE, source=before)
    git("init", "-q")
    commit("A baseline")
    return suite.run(source=after)


def test_an_edit_that_allocates_nothing_is_offered_and_not_said_to_be_the_cause(suite):
    """As in diffusers#9648: activations of a forward that no backward follows."""
    header = "with torch.no_grad():  # {comment}\n            "
    session = after_an_edit(suite, RECONSTRUCT, RECONSTRUCT.replace(header, ""))
    assert lead(session).endswith(" at test_it.py:10 (test_it)")
    edit = "edited since the baseline: test_it.py:10 is gone: with torch.no_grad():"
    assert f"note: {edit}" in session.flat
    assert BLAME in session.out
    hint = "activations of 224.00 MiB are of a forward pass that no backward pass followed"
    assert f"hint: {hint}" in session.flat


def test_a_decorator_that_is_gone_is_offered(suite):
    after = RECONSTRUCT.replace("with torch.no_grad()", "if True")
    before = after.replace("    def test_it", "    @torch.no_grad()\n    def test_it")
    session = after_an_edit(suite, before, after)
    edit = "edited since the baseline: test_it.py:7 is gone: @torch.no_grad()"
    assert f"note: {edit}" in session.flat
    assert BLAME in session.out


def test_the_nearest_of_many_edits_are_offered_and_the_others_counted(suite):
    lines = "".join(f"    A{at} = {at}\n    B = 1\n" for at in range(6))
    body = """
    @pytest.mark.gpu_memory
    def test_it():
        torch.zeros(ROWS, 1024, device="cuda")
    """
    before = f"{lines}    ROWS = 4096\n{body}"
    after = before.replace("A", "C").replace("ROWS = 4096", "EDITS = 1\n    ROWS = 8192")
    session = after_an_edit(suite, before, after)
    assert "note: edited since the baseline: test_it.py:6 changed: A0 -> C0; " in session.flat
    assert "; and 4 more edits" in session.flat
    assert BLAME in session.out


def test_of_edits_that_are_not_linked_those_of_the_function_that_grew_come_first(suite):
    """As a removed zero_grad(): the line that is gone neither allocates nor keeps anything."""
    after = EDITED.replace("a + 1", "a + 2").replace("        sgd.zero_grad()\n", "")
    session = after_an_edit(suite, EDITED, after)
    edits = r"the baseline: test_it\.py:\d+ is gone: sgd\.zero_grad\(\); test_it\.py:\d+ changed: "
    assert re.search(edits, session.flat)


def test_a_single_edit_that_leads_is_not_offered_as_well(committed):
    session = committed.run(source=STEP.replace("torch.ones(8192", "torch.ones(16384"))
    assert lead(session) == "test_it.py:13 changed: 8192 -> 16384"
    assert "edited since" not in session.flat
    assert "gpumem blame" not in session.out


def test_a_comment_alone_is_no_edit_of_a_line_that_grew(suite):
    text = """
    ROWS = {rows}

    @pytest.mark.gpu_memory
    def test_it():
        torch.zeros(ROWS, 1024, device="cuda")  # {comment}
    """
    before, after = (text.format(rows=rows, comment=f"of {rows}") for rows in (4096, 8192))
    session = after_an_edit(suite, before, after)
    assert lead(session).endswith(" at test_it.py:10 (test_it)")
    assert "note: edited since the baseline: test_it.py:6 changed: 4096 -> 8192" in session.flat


PATCH = """\
diff --git a/a.py b/a.py
index 1..2 100644
--- a/a.py
+++ b/a.py
@@ -3,2 +3,3 @@ def f():
-x = f(1)
-# why
+x = f(2)
+# why not
+y = g(x)
@@ -9 +9,0 @@
-optimizer.zero_grad()
@@ -20 +19 @@
-z = 1  # one
+z = 1  # the first
diff --git "a/b c.py" "b/b c.py"
--- a/b c.py\t
+++ b/b c.py\t
@@ -0,0 +1 @@
+--- = 1
"""


def test_a_patch_is_read_line_by_line():
    edits = [(it.path, it.line, it.old, it.new) for it in edits_of_patch(PATCH)]
    assert edits == [
        ("a.py", 3, "x = f(1)", "x = f(2)"),
        ("a.py", 5, "", "y = g(x)"),
        ("a.py", 10, "optimizer.zero_grad()", ""),
        ("b c.py", 1, "", "--- = 1"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nn.Linear(4096, 16)", "nn.Linear(16384, 16)", "changed: 4096 -> 16384"),
        ("a = f(x, 4 * w)", "a = f(x, 8 * w)", "changed: 4 * w -> 8 * w"),
        ("f(x, y=1)", "f(x, y=1, z=2)", "changed: z=2 was added"),
        ("f(x, y=1, z=2)", "f(x, y=1)", "changed: z=2 was removed"),
        ("", "y = f(x)", "is new: y = f(x)"),
        ("y = f(x)", "", "is gone: y = f(x)"),
    ],
)
def test_an_edit_is_told_by_what_differs(old, new, words):
    assert edit_words(old, new) == words
