"""Progress of a long recording: seldom, with the time that is left, on a terminal alone."""

from __future__ import annotations

from pytest_gpumem.plugin import recording_progress, session_plugin
from pytest_gpumem.plugin.recording_progress import RecordingProgress
from pytest_gpumem.sizes import duration

THREE = """
    @pytest.mark.parametrize("number", range(3))
    @pytest.mark.gpu_memory
    def test_it(number):
        mib(1)
"""


def test_lines_come_seldom_and_tell_the_time_that_is_left():
    now = [0.0]
    progress = RecordingProgress(lambda: now[0])
    lines = []
    for _ in range(100):
        now[0] += 4.0
        lines.append(progress.finish(100))
    told = [line for line in lines if line]
    assert told[0] == "8 of 100 tests done, about 6 min left"
    assert told[-1] == "96 of 100 tests done, about 16 s left"
    assert len(told) == 12
    assert lines[-1] == ""


def test_time_is_told_in_one_unit():
    assert [duration(it) for it in (0.2, 45, 89, 90, 3600, 5399, 9000)] == [
        *("1 s", "45 s", "89 s", "2 min", "60 min", "90 min", "2 h"),
    ]


def test_a_recording_tells_it_on_a_terminal_alone(suite, monkeypatch):
    monkeypatch.setattr(recording_progress, "EVERY_S", 0.0)
    line = "gpumem: 1 of 3 tests done, about"
    assert line not in suite.run("--gpumem-update-baselines", source=THREE).out
    screen = session_plugin.screen_of
    monkeypatch.setattr(
        session_plugin, "screen_of", lambda reporter: screen(reporter)._replace(interactive=True)
    )
    assert line in suite.run("--gpumem-update-baselines").out
    assert line not in suite.run().out
