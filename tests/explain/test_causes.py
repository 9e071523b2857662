"""The causes of a grown peak: their order, and why each of them grew."""

from __future__ import annotations

from dataclasses import replace

from pytest_gpumem.explain.causes import growth_causes, line_growths
from pytest_gpumem.explain.lead import lead_of
from pytest_gpumem.judge.verdict import Comparison
from pytest_gpumem.measurement import Attribution, Breakdown, Keeper, LinePeak, Site
from pytest_gpumem.sizes import MIB

GREW = Comparison(0, "allocated", 300 * MIB, 100 * MIB, 1 * MIB)
HEAD = Site("m.py", 9, "Net.forward", "return self.head(x)", "", "activations", 10 * MIB, 1)
BACKWARD = Site("t.py", 4, "train", "loss.backward()", "", "gradients", 10 * MIB, 2)
STATE = Site("t.py", 5, "train", "optimizer.step()", "", "optimizer state", 10 * MIB, 2)
MODEL = Site("t.py", 2, "train", "model = Net().cuda()", "", "parameters", 10 * MIB, 2)


def line(site, mib, **changes):
    """The own peak of a site's line."""
    peak = LinePeak(site.path, site.line, site.function, site.code, mib * MIB)
    return replace(peak, calls_pass=site.category == "gradients", **changes)


def breakdown(*sites, lines=(), **others):
    categories = {}
    for site in sites:
        categories[site.category] = categories.get(site.category, 0) + site.nbytes
    return Breakdown(categories, 0, sites, tuple(lines), **others)


def sized(site, mib, blocks=None):
    return replace(site, nbytes=mib * MIB, blocks=blocks or site.blocks)


def causes(current, baseline, keepers=()):
    return growth_causes(GREW, [baseline], [Attribution(current, keepers=keepers)])


def test_a_line_comes_first_by_the_growth_that_is_its_own():
    """The peak moved to a moment with all gradients, of which there are no more than before."""
    baseline = breakdown(HEAD, BACKWARD, lines=[line(BACKWARD, 80), line(HEAD, 64)])
    current = breakdown(
        sized(BACKWARD, 80), sized(HEAD, 60), lines=[line(HEAD, 114), line(BACKWARD, 80)]
    )
    (head,) = causes(current, baseline)
    assert (head.site.code, head.nbytes, head.baseline_blocks) == (HEAD.code, 50 * MIB, 1)
    # A baseline of 0.1.0 has no lines' peaks: the largest growth comes first.
    old = replace(baseline, lines=())
    assert [cause.category for cause in causes(current, old)] == ["gradients", "activations"]


def test_memory_that_another_line_allocates_now_is_no_cause():
    """As optimizer.state that a function fills before optimizer.step() would."""
    warm = sized(replace(STATE, line=30, code="opt.state[p].update(...)"), 256)
    backup = sized(replace(HEAD, line=31, code="backup = [...]", category="other"), 128)
    baseline = breakdown(sized(STATE, 256), HEAD)
    (first,) = causes(breakdown(warm, backup, HEAD), baseline)
    assert (first.site.code, first.nbytes) == (backup.code, 128 * MIB)
    # A part of it moved, and the rest is new; memory of another category is the same bytes.
    (first,) = causes(breakdown(sized(warm, 300), HEAD), baseline)
    assert (first.site.code, first.nbytes) == (warm.code, 44 * MIB)
    renamed = replace(warm, category="other")
    (first,) = causes(breakdown(renamed, replace(backup, category="buffers"), HEAD), baseline)
    assert first.site.code == backup.code


def test_a_headline_names_no_more_than_the_growth():
    baseline = breakdown(HEAD, sized(BACKWARD, 80))
    (first,) = causes(breakdown(sized(HEAD, 410), sized(BACKWARD, 10)), baseline)
    assert first.nbytes == 400 * MIB
    lead = lead_of([first], growth=GREW.difference)
    assert lead.sentence == "activations +200.00 MiB at m.py:9 (Net.forward)"


def test_a_line_whose_text_changed_comes_first_where_it_grew_by_itself():
    """The line that makes a wider layer, before the lines that run it and grow more."""
    baseline = breakdown(HEAD, MODEL, STATE)
    wider = replace(MODEL, code="model = Net(2).cuda()")
    first, *_ = causes(breakdown(sized(HEAD, 80), sized(wider, 15), STATE), baseline)
    assert (first.site.code, first.old_code) == (wider.code, MODEL.code)
    # With a larger batch all lines grow by one factor: the line that was edited is not the cause.
    baseline = breakdown(HEAD, *(replace(HEAD, line=line, code=f"x{line}") for line in (5, 6)))
    edited = replace(HEAD, code="return self.head(x) + 0")
    others = [sized(replace(HEAD, line=line, code=f"x{line}"), 30) for line in (5, 6)]
    together = causes(breakdown(*others, sized(edited, 30)), baseline)
    assert [cause.old_code for cause in together] == ["", "", HEAD.code]
    alone = causes(breakdown(sized(edited, 90), *others), baseline)
    assert alone[0].old_code == HEAD.code


def test_parameters_come_before_the_gradients_and_the_state_that_follow_them():
    baseline = breakdown(MODEL, BACKWARD, STATE)
    current = breakdown(sized(STATE, 50), sized(BACKWARD, 30), sized(MODEL, 30))
    categories = [cause.category for cause in causes(current, baseline)]
    assert categories == ["parameters", "optimizer state", "gradients"]
    little = causes(breakdown(sized(STATE, 50), BACKWARD, sized(MODEL, 11)), baseline)
    assert [cause.category for cause in little] == ["optimizer state", "parameters"]
    alone = causes(breakdown(sized(STATE, 50), BACKWARD, MODEL), baseline)
    assert [cause.category for cause in alone] == ["optimizer state"]


def test_a_backward_names_the_line_of_its_forward_that_grew_most():
    baseline = breakdown(BACKWARD, HEAD, lines=[line(BACKWARD, 10), line(HEAD, 10)])
    upcast = replace(HEAD, line=8, code="x = x.double()")
    peaks = [line(BACKWARD, 90), line(upcast, 64), line(HEAD, 11)]
    (cause, *_) = causes(breakdown(sized(BACKWARD, 90), HEAD, lines=peaks), baseline)
    reason = "as a result, m.py:8 allocates 64.00 MiB more in the forward pass: x = x.double()"
    assert cause.reasons == (reason,)


def test_what_keeps_most_of_a_line_s_growth_is_told_and_what_keeps_little_is_not():
    kept = Keeper("m.py", 9, "activations", "global variable LOG of t.py", 40 * MIB, 4, (1, 2, 3))
    little = replace(kept, text="local variable x of train, t.py:3", nbytes=MIB, steps=())
    elsewhere = replace(kept, line=10)
    baseline, current = breakdown(HEAD), breakdown(sized(HEAD, 50, 5))
    (half,) = causes(current, baseline, (replace(kept, nbytes=20 * MIB, steps=()),))
    assert half.reasons == ("20.00 MiB kept by global variable LOG of t.py",)
    (cause,) = causes(current, baseline, (kept, little, elsewhere))
    assert cause.keepers == (kept,)
    assert cause.reasons == ("kept by global variable LOG of t.py, of steps 1, 2 and 3",)
    assert (kept.name, little.name) == ("global variable LOG", "local variable x")


def test_fragmentation_is_told_where_nobody_asked_for_most_of_the_growth():
    baseline = breakdown(HEAD, unsplit=0)
    (cause,) = causes(breakdown(sized(HEAD, 13), unsplit=2 * MIB), baseline)
    assert cause.reasons[0].startswith(
        "fragmentation: 2.00 MiB more are unused in blocks that are larger"
    )
    assert causes(breakdown(sized(HEAD, 13), unsplit=MIB), baseline)[0].reasons == ()
    unknown = replace(baseline, unsplit=None)
    assert causes(breakdown(sized(HEAD, 13), unsplit=2 * MIB), unknown)[0].reasons == ()


def test_autocast_that_is_lost_is_told():
    current = breakdown(sized(HEAD, 50), autocast=False)
    (cause,) = causes(current, breakdown(HEAD, autocast=True))
    assert cause.reasons == ("no module runs under torch.autocast any more",)
    for before in (False, None):
        assert causes(current, breakdown(HEAD, autocast=before))[0].reasons == ()


def test_an_edited_line_is_the_one_whose_code_is_most_alike():
    old = [line(replace(HEAD, code="return self.head(self.features(x))"), 64)]
    new = [
        line(replace(HEAD, code="logits = self.head(self.features(x))"), 64),
        line(replace(HEAD, line=10, code="return logits.contiguous()"), 65),
    ]
    growths = {growth.peak.code: growth.nbytes // MIB for growth in line_growths(new, old)}
    assert growths == {
        "return logits.contiguous()": 65,
        "logits = self.head(self.features(x))": 0,
    }


def test_of_a_line_smaller_than_all_that_a_baseline_keeps_no_growth_is_told():
    small = line(replace(HEAD, path="other.py"), 3)
    assert [growth.peak for growth in line_growths([line(HEAD, 64), small], [line(HEAD, 64)])] == [
        line(HEAD, 64)
    ]


def test_a_line_that_the_baseline_did_not_list_is_told_by_what_it_has_at_least():
    """In a step of many GiB a new line may be smaller than all that a baseline lists."""
    planted = Site("t.py", 6, "train", "planted = torch.empty(n)", "", "other", 80 * MIB, 1)
    listed = breakdown(sized(HEAD, 400))
    baseline = replace(listed, categories={**listed.categories, "other": 8 * MIB})
    current = breakdown(sized(HEAD, 400), planted)
    (first,) = causes(current, baseline)
    assert (first.site, first.category, first.nbytes) == (None, "other", 72 * MIB)
    lead = lead_of([first], growth=GREW.difference)
    assert lead.sentence == "other +72.00 MiB, at least 72.00 MiB of it at t.py:6 (train)"
    # Half of the growth may be another line's.
    categories = {**listed.categories, "other": 48 * MIB}
    (first,) = causes(current, replace(listed, categories=categories))
    assert (first.nbytes, first.reasons) == (
        32 * MIB,
        ("at least 32.00 MiB of it at t.py:6 (train)",),
    )
    other = replace(planted, line=7, code="more = torch.empty(n)", nbytes=70 * MIB)
    more = breakdown(sized(HEAD, 400), planted, other)
    (first,) = causes(more, replace(listed, categories=categories))
    assert (first.nbytes, first.reasons) == (102 * MIB, ())
    # More than half of the growth is one line's.
    less = breakdown(sized(HEAD, 400), planted, replace(other, nbytes=30 * MIB))
    (first,) = causes(less, baseline)
    assert (first.nbytes, first.reasons) == (
        102 * MIB,
        ("at least 72.00 MiB of it at t.py:6 (train)",),
    )
    # Memory of another category that only moved has no line.
    moved = replace(
        listed, categories={**listed.categories, "other": 8 * MIB, "temporaries": 60 * MIB}
    )
    (first,) = causes(current, moved)
    assert (first.category, first.nbytes, first.reasons) == ("other", 72 * MIB, ())


def test_a_line_of_a_small_part_of_the_growth_does_not_lead():
    """Compiled code may take 512 bytes more with warm caches; the rest is of no listed line."""
    planted = Site("t.py", 6, "train", "planted = torch.empty(n)", "", "other", 80 * MIB, 1)
    listed = breakdown(sized(HEAD, 400), lines=[line(HEAD, 400)])
    baseline = replace(listed, categories={**listed.categories, "other": 8 * MIB})
    for mib, named in ((401, None), (420, HEAD.line)):
        grown = sized(HEAD, mib)
        current = breakdown(grown, planted, lines=[line(HEAD, mib)])
        first = causes(current, baseline)[0]
        assert (first.site and first.site.line) == named
