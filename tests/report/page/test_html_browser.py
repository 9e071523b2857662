"""The page in a real browser: Chromium shows it, and is clicked, typed at and asked.

GPUMEM_SCREENSHOTS=FOLDER keeps pictures of it there; look at them after a change of its looks.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.page_browser import (
    ARGUMENTS,
    CHROMIUM,
    COLOURS,
    DESKTOP,
    PHONE,
    SLOWEST,
    Shown,
    served,
)
from helpers.sample_report import EVIL, many, sample

from pytest_gpumem.report.model import Report
from pytest_gpumem.report.page.html import page

pytest.importorskip("jinja2", reason="pip install 'pytest-gpumem[html]'")
pytestmark = [
    pytest.mark.skipif(
        find_spec("playwright") is None,
        reason="the page is not tested in a browser: pip install playwright",
    ),
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="the page is not tested in a browser: apt-get install chromium (Debian, Ubuntu)",
    ),
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright  # most sessions collect this file and run none

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=SLOWEST)
        yield found
        found.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The pages, by name."""
    folder = tmp_path_factory.mktemp("pages")
    reports = {
        "sample": sample(),
        "thousand": Report(sample().results[-1:] + tuple(many(1000, attributed=30))),
        "ten-thousand": Report(tuple(many(10_000))),
        "empty": Report(),
    }
    paths = {}

    def made(name):
        if name not in paths:
            paths[name] = folder / f"{name}.html"
            text = page(reports[name], when="2026-11-21 12:40 UTC")
            paths[name].write_text(text, encoding="utf-8")
        return paths[name]

    return made


def open_page(browser, path, size=None, hash_="", **more):
    context = browser.new_context(viewport=size or DESKTOP, **more)
    return Shown(context.new_page(), f"{path.as_uri()}{hash_}")


def check_quiet(shown):
    """Whatever a page does, it logs nothing and asks nobody for anything."""
    assert shown.said == []
    assert {url.partition("#")[0] for url in shown.asked} == {shown.url.partition("#")[0]}


@pytest.fixture(scope="module")
def tabs(browser):
    """Tabs of the plain desktop that no test shows a page in at present."""
    free = []
    yield free
    for shown in free:
        shown.tab.context.close()


@pytest.fixture
def show(browser, files, tabs):
    """Show a page anew, in a context of its own if it is not the plain desktop's."""
    plain, others = [], []

    def opened(name="sample", size=None, hash_="", **more):
        if size or more or not tabs:
            shown = open_page(browser, files(name), size, hash_, **more)
        else:
            shown = tabs.pop()
            shown.tab.mouse.move(0, 0)
            shown.go(f"{files(name).as_uri()}{hash_}")
        (others if size or more else plain).append(shown)
        return shown

    yield opened
    for shown in (*plain, *others):
        check_quiet(shown)
    for shown in others:
        shown.tab.context.close()
    for shown in plain:
        shown.ask("localStorage.clear()")
    tabs += plain


@pytest.fixture(scope="module")
def unchanged(browser, files):
    """Pages that tests only look at, by what they are shown with."""
    pages = {}

    def opened(name="sample", size=DESKTOP, color_scheme="light", **more):
        key = name, size["width"], color_scheme, *sorted(more)
        if key not in pages:
            more["color_scheme"] = color_scheme
            pages[key] = open_page(browser, files(name), size, **more)
        return pages[key]

    yield opened
    for shown in pages.values():
        shown.tab.context.close()


@pytest.fixture
def look(unchanged):
    """Show a page that the test does not change: tests share it."""
    seen = []

    def opened(*args, **more):
        seen.append(unchanged(*args, **more))
        return seen[-1]

    yield opened
    for shown in seen:
        check_quiet(shown)


def test_it_shows_every_test_and_asks_for_nothing(look):
    shown = look()
    assert len(shown.column(0)) == len(sample().results) == len(shown.sections)
    assert shown.asked == [shown.url]
    assert shown.tab.title() == "GPU memory, 2026-11-21 12:40 UTC"


def test_a_click_on_a_column_sorts_by_it_and_a_second_one_the_other_way(show):
    shown = show()
    assert shown.sorted_by() == [["verdict", "ascending"]]
    shown.tab.click("th button:has-text('allocated')")
    figures = [float(text) for text in shown.column(3)]
    assert figures == sorted(figures, reverse=True)
    assert figures[0] != figures[-1]
    assert shown.sorted_by() == [["allocated", "descending"]]
    shown.tab.click("th button:has-text('allocated')")
    assert [float(text) for text in shown.column(3)] == figures[::-1]
    shown.tab.click("th button:has-text('test')")
    names = shown.column(0)
    places = [names.index(f"test_{it}") for it in ("data_parallel", "gpt2_large", "on_another")]
    assert places == sorted(places)
    assert shown.sorted_by() == [["test", "ascending"]]


@pytest.mark.parametrize("clicks", [1, 2])
def test_what_has_no_figure_stays_last_either_way(show, clicks):
    shown = show()
    for _ in range(clicks):
        shown.tab.click("th button:has-text('change')")
    texts = shown.column(6)
    assert texts.count("n/a") == 2
    assert set(texts[-3:]) == {"n/a", "new"}


def test_the_keyboard_alone_sorts_filters_and_opens(show):
    shown = show("thousand")
    press = shown.tab.keyboard.press
    shown.tab.focus("#theme")
    seen = []
    for _ in range(20):
        press("Tab")
        seen.append(shown.ask("document.activeElement.id || document.activeElement.innerText"))
        if seen[-1].startswith("allocated"):
            break
    assert {"search", "failures"} <= set(seen)
    press("Enter")
    assert shown.sorted_by() == [["allocated", "descending"]]
    press("Space")
    assert shown.sorted_by() == [["allocated", "ascending"]]
    shown.tab.focus("#failures")
    press("Space")
    assert len(shown.column(0)) == 10
    shown.tab.focus("#rows a")
    press("Enter")
    shown.tab.wait_for_selector("section.result summary:focus")
    assert shown.focused == f"{shown.sections[0]}-name"


def test_the_first_key_stroke_can_leap_to_the_table(show):
    shown = show()
    shown.tab.keyboard.press("Tab")
    assert shown.ask("document.activeElement.className") == "skip"
    shown.tab.keyboard.press("Enter")
    assert shown.focused == "tests"


def test_words_and_failures_filter_and_the_address_keeps_it(show):
    shown = show()
    shown.tab.fill("#search", "gpt2 REGRESSED")
    assert shown.column(0) == ["test_gpt2_step_retains[8]"]
    assert shown.tab.inner_text("#status") == "1 of 12"
    shown.tab.fill("#search", "")
    shown.tab.check("#failures")
    assert set(shown.column(8)) == {"✕ out of memory", "✕ over budget", "✕ regressed"}
    assert len(shown.column(8)) == 4
    assert shown.ask("location.hash") == "#failures=1"
    shown.tab.fill("#search", "no such test")
    assert shown.tab.is_visible("#none")


def test_the_address_can_ask_for_failures_and_for_words(show):
    shown = show(hash_="#failures=1&q=data")
    assert shown.column(0) == ["test_data_parallel"]
    assert shown.tab.is_checked("#failures")
    assert shown.tab.input_value("#search") == "data"


def test_a_count_filters_by_its_verdict(show):
    shown = show()
    shown.tab.click(".counts button:has-text('incomparable')")
    assert shown.column(8) == ["○ incomparable"] * 2
    shown.tab.click(".counts button:has-text('incomparable')")
    assert len(shown.column(8)) == 12


def test_a_name_leads_to_its_section(show):
    shown = show("thousand")
    shown.tab.fill("#search", "model-123-")
    shown.tab.click("#rows a")
    shown.tab.wait_for_selector("section.result summary:focus")
    heading = shown.tab.inner_text("section.result summary:focus h3")
    assert "test_step[model-123-fp16]" in heading
    assert shown.tab.locator("section.result:has(summary:focus)").is_visible()
    assert 0 <= shown.ask("document.activeElement.getBoundingClientRect().top") < 800
    shown.tab.click("section.result:has(summary:focus) a.back")
    assert shown.ask("location.hash") == "#tests"
    assert shown.column(0) != []


def test_an_address_of_a_section_opens_it(show):
    shown = show("thousand")
    ids = shown.ask("[...document.querySelectorAll('#rows a')].map(it => it.hash)")
    again = show("thousand", hash_=ids[50])
    assert again.focused == f"{ids[50][1:]}-name"


@pytest.mark.parametrize("name", ["sample", "thousand"])
def test_markup_in_names_is_inert_wherever_it_is_shown(show, name):
    shown = show(name)
    shown.tab.fill("#search", "onerror=alert(2)")
    (text,) = shown.column(0)
    assert text == (
        EVIL.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
        + " (<img src=x onerror=alert(2)>)"
    )
    shown.tab.click("#rows a")
    shown.tab.wait_for_selector("section.result summary:focus")
    assert shown.ask("document.querySelectorAll('img').length") == 0
    assert shown.ask("document.querySelectorAll('body script:not([type])').length") == 1


def test_the_pages_policy_stops_markup_that_would_get_through(browser, files, server):
    """Were a name ever not escaped, it could neither run nor ask for anything."""
    text = files("sample").read_text(encoding="utf-8")
    hole = "<script>document.title = 'run'</script><img src='x.png' "
    hole += "onerror=\"document.title = 'run'\"><p style='color: red' id='styled'></p>"
    path = files("sample").with_name("hole.html")
    path.write_text(text.replace("<main>", f"<main>{hole}"), encoding="utf-8")
    tab = browser.new_page()
    tab.set_default_timeout(SLOWEST)
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.goto(f"{server.address}/hole.html")
    tab.wait_for_selector("html[data-ready]")
    assert tab.title() != "run"
    assert server.asked == ["/hole.html"]
    assert len([it for it in said if "Content Security Policy" in it]) >= 3
    tab.close()


def test_a_command_is_copied(show):
    shown = show(permissions=["clipboard-read", "clipboard-write"])
    shown.tab.click("button.copy >> nth=0")
    shown.tab.wait_for_selector("button.copy:has-text('Copied')")
    command = shown.ask("navigator.clipboard.readText()")
    assert command == shown.tab.inner_text(".command code >> nth=0")
    assert command.startswith("pytest ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_the_systems_and_text_has_contrast(look, scheme):
    shown = look(color_scheme=scheme)
    back = shown.ask("getComputedStyle(document.body).backgroundColor")
    channels = [int(it) for it in back.removeprefix("rgb(").removesuffix(")").split(",")]
    assert (sum(channels) > 600) == (scheme == "light")
    assert shown.ask(COLOURS) == []


def test_a_button_changes_light_and_dark_and_is_remembered(show):
    shown = show(color_scheme="light")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = shown.ask(colour)
    assert shown.tab.inner_text("#theme") == "Dark"
    shown.tab.click("#theme")
    dark = shown.ask(colour)
    assert dark != light
    shown.go(shown.url)
    assert shown.ask(colour) == dark
    shown.tab.click("#theme")
    assert shown.ask(colour) == light


def test_areas_of_a_timeline_have_the_colours_of_their_legend(look):
    shown = look()
    pairs = shown.ask(
        """
        () => {
          const section = document.querySelector("section.result:has(svg.timeline)");
          return [...section.querySelectorAll(".area")].map((it) => {
            const name = it.getAttribute("class").split(" ")[1];
            const swatch = section.querySelector(`.legend .swatch.${name}`);
            return [getComputedStyle(it.firstElementChild).fill,
                    getComputedStyle(swatch).backgroundColor];
          });
        }
        """
    )
    assert len(pairs) == 8
    assert all(a == b for a, b in pairs)
    assert len({a for a, _ in pairs}) == len(pairs)


@pytest.mark.parametrize("name", ["sample", "thousand"])
def test_a_phone_needs_no_sideways_scrolling_and_hides_no_figure(look, name):
    shown = look(name, PHONE, has_touch=True, is_mobile=True)
    assert shown.ask("document.documentElement.scrollWidth") == 360
    wide = shown.ask(
        "[...document.querySelectorAll('main *')].filter(it => it.checkVisibility() && "
        "it.getBoundingClientRect().right > 361 && !it.closest('.scroll')).length"
    )
    assert wide == 0
    boxes = (
        "[...document.querySelectorAll('.scroll')].filter(it => it.scrollWidth > it.clientWidth)"
    )
    assert shown.ask(f"{boxes}.length") == 0
    row = shown.tab.inner_text("#rows tr >> nth=0")
    for word in ("allocated", "reserved", "change"):
        assert word in row or shown.ask(
            f"getComputedStyle(document.querySelector('#rows td[data-label={word}]'), "
            "'::before').content"
        ).startswith(f'"{word}')


def test_on_a_phone_a_change_is_one_line(look):
    shown = look("sample", PHONE, has_touch=True, is_mobile=True)
    heights = shown.tab.eval_on_selector_all(
        "#rows td.change", "cells => cells.map(cell => cell.getBoundingClientRect().height)"
    )
    assert len(heights) == len(sample().results)
    assert max(heights) < 2 * min(heights)


def test_an_open_section_is_closed_by_its_head_and_opened_by_its_name(show):
    shown = show()
    first = shown.tab.locator("section.result").first
    assert first.locator(".headline").is_visible()
    first.locator("summary").click()
    assert first.locator(".headline").is_hidden()
    shown.tab.click("#rows a >> nth=0")
    first.locator(".headline").wait_for(state="visible")
    last = shown.tab.locator("section.result").last
    assert last.locator(".headline").is_hidden()
    shown.tab.click("#rows a >> nth=-1")
    last.locator(".headline").wait_for(state="visible")


def test_a_page_of_few_failures_is_short(look):
    """Of 12 results four failed: it was 21,000 px long with all details open."""
    assert look().ask("document.documentElement.scrollHeight") < 9_000


def test_a_page_of_ten_thousand_tests_is_ready_sorted_and_filtered_at_once(show):
    shown = show("ten-thousand")
    seconds = shown.cpu_seconds(lambda: shown.tab.reload(wait_until="load"))
    assert 0 < seconds < 5  # tenths of a second; what grows with the square takes minutes
    assert shown.tab.inner_text("#status") == "500 in all"
    assert "500 of 10000 results" in shown.tab.inner_text("header")
    seconds = shown.cpu_seconds(lambda: shown.tab.click("[data-column='0']"))
    assert 0 < seconds < 5
    assert shown.column(0)[0].endswith("test_step[model-0-fp16]")
    shown.tab.fill("#search", "model-9907-")
    assert len(shown.column(0)) == 1


def test_a_page_without_results_is_quiet(show):
    """Its script has no table to work on, and says nothing of it."""
    shown = show("empty")
    assert "No test was measured." in shown.tab.inner_text("main")


def test_without_javascript_the_table_and_the_failures_are_there(browser, files):
    context = browser.new_context(java_script_enabled=False)
    tab = context.new_page()
    tab.set_default_timeout(SLOWEST)
    tab.goto(files("thousand").as_uri())
    assert tab.locator("#rows tr").count() == 500
    assert tab.locator("section.result").count() == 500
    assert tab.is_hidden("#filter")
    assert "Sorting and filtering need JavaScript" in tab.inner_text("main")
    context.close()


def test_on_paper_it_is_light_and_without_controls(show):
    shown = show(color_scheme="dark")
    shown.tab.emulate_media(media="print")
    assert shown.ask("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert shown.tab.is_hidden("#filter")
    assert shown.tab.is_hidden("#theme")
    assert shown.ask(COLOURS) == []
    assert shown.tab.is_visible("section.result >> nth=3")


@pytest.fixture
def server(files):
    with served(files("sample").parent) as running:
        yield running


def test_served_by_a_web_server_it_asks_for_nothing_more(browser, server):
    """As CI's artifacts are: a browser asks a server for an icon where a page names none."""
    tab = browser.new_page()
    tab.set_default_timeout(SLOWEST)
    tab.goto(f"{server.address}/sample.html")
    tab.wait_for_selector("html[data-ready]")
    tab.close()
    assert server.asked == ["/sample.html"]


def test_pictures_of_it_are_kept_where_they_are_asked_for(show, tmp_path):
    """Whoever changes its looks looks at these."""
    folder = Path(os.environ.get("GPUMEM_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    shown = show(color_scheme="light")
    for scheme in ("light", "dark"):
        shown.tab.emulate_media(color_scheme=scheme)
        for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
            shown.tab.set_viewport_size(size)
            shown.ask("scrollTo(0, 0)")
            shown.tab.screenshot(path=folder / f"{name}-{scheme}.png")
            shown.tab.eval_on_selector("section.result >> nth=2", "it => it.scrollIntoView()")
            path = folder / f"{name}-{scheme}-section.png"
            shown.tab.screenshot(path=path)
            assert path.stat().st_size > 10_000


def test_failures_of_one_cause_stand_together_and_the_address_keeps_it(show):
    shown = show("thousand")
    shown.tab.check("#grouped")
    heads = shown.tab.eval_on_selector_all("#rows tr.group", "them => them.map(it => it.innerText)")
    assert [" ".join(head.split()) for head in heads] == [
        "regressed 9 tests",
        "parameters, src/model.py:41 (GPT.__init__) 1 test",
        "no failure 490 tests",
    ]
    shown.go(shown.ask("location.href"))
    assert shown.ask("document.getElementById('grouped').checked")
    shown.tab.fill("#search", "src/model.py:41")
    assert len(shown.column(0)) == 2  # its head and the test


# Timelines


CURSOR = "section.result .cursor"
VIEW = "document.querySelector('svg.timeline .plot').getAttribute('viewBox')"


def readout(shown):
    return shown.tab.locator(".readout").first.inner_text().replace("\n", " ")


def test_a_place_in_a_timeline_is_told_to_keys_and_to_readers(show):
    shown = show()
    cursor = shown.tab.locator(CURSOR).first
    assert "113 of 271 · backward" in readout(shown)
    cursor.focus()
    shown.tab.keyboard.press("Home")
    assert cursor.get_attribute("aria-valuenow") == "1"
    for key in (
        "ArrowRight",
        "ArrowRight",
        "ArrowLeft",
        "End",
        "p",
        "Shift+ArrowLeft",
        "ArrowRight",
    ):
        shown.tab.keyboard.press(key)
    words = cursor.get_attribute("aria-valuetext")
    assert words.startswith("87 of 271 · forward · src/model.py:141 in MLP.forward, ")
    assert ", allocated " in words
    assert ", reserved " in words
    assert re.search(r", baseline \d+\.\d\d MiB, ", words)
    assert ", optimizer state 1073.50 MiB" in words
    assert "87 of 271" in readout(shown)


def test_a_pointer_tells_the_place_below_it_and_a_drag_enlarges_a_stretch(show):
    shown = show()
    cursor = shown.tab.locator(CURSOR).first
    cursor.scroll_into_view_if_needed()
    box = cursor.bounding_box()

    def at(share):
        return box["x"] + share * box["width"], box["y"] + box["height"] / 2

    shown.tab.mouse.move(*at(0.25))
    assert "68 of 271 · forward" in readout(shown)
    shown.tab.mouse.down()
    shown.tab.mouse.move(*at(0.5))
    shown.tab.mouse.up()
    start, _, span, _ = map(float, shown.ask(VIEW).split())
    assert (start, span) == (67, 69)
    inside = shown.ask(
        "[...document.querySelector('svg.timeline').querySelectorAll('.phase-name')]"
        ".filter(it => it.style.visibility !== 'hidden').map(it => it.textContent)"
    )
    assert inside == ["forward", "backward"]
    shown.tab.locator(".readout button").first.click()
    assert shown.ask(VIEW).split()[0] == "0"


def test_keys_alone_enlarge_a_stretch_and_show_all_again(show):
    shown = show()
    shown.tab.locator(CURSOR).first.focus()
    shown.tab.keyboard.press("p")
    for _ in range(3):
        shown.tab.keyboard.press("+")
    start, _, span, _ = map(float, shown.ask(VIEW).split())
    assert start <= 112 < start + span
    assert span == pytest.approx(271 / 8, abs=2)
    shown.tab.keyboard.press("Home")  # a place that is not shown brings its stretch
    assert shown.ask(VIEW).startswith("0 0 ")
    shown.tab.keyboard.press("Escape")
    assert shown.ask(VIEW).split()[2] == "271"


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_no_two_labels_of_a_timeline_meet(look, size):
    shown = look("sample", size)
    met = shown.ask(
        """
        () => [...document.querySelectorAll("svg.timeline")].flatMap((svg) => {
          const names = [...svg.querySelectorAll(".phase-name")];
          const boxes = names.filter((it) => it.checkVisibility())
            .map((it) => it.getBoundingClientRect()).sort((a, b) => a.x - b.x);
          return boxes.slice(1).filter((it, index) => it.x < boxes[index].right).map((it) => it.x);
        })
        """
    )
    assert met == []


OPERATED = {"button", "checkbox", "link", "searchbox", "slider", "DisclosureTriangle"}
"""roles of what a reader operates"""


def test_the_accessibility_tree_names_every_control_and_the_keyboard_reaches_each(show):
    shown = show(color_scheme="light")  # the tree is kept up to date for good
    session = shown.tab.context.new_cdp_session(shown.tab)
    nodes = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip(), node)
        for node in session.send("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"] and "role" in node
    ]
    named = OPERATED | {"img", "image", "table", "region", "search", "heading"}
    assert [role for role, name, _ in nodes if role in named and not name] == []
    told = {(role, re.sub(r"([:,.] | [+-]\d).*", "", name)) for role, name, _ in nodes}
    assert told >= {
        ("button", "Dark"),
        ("button", "Copy"),
        ("checkbox", "failures only"),
        ("checkbox", "group by cause"),
        ("searchbox", "Filter"),
        ("slider", "Place in the timeline"),
        ("table", "Peak memory of all tests"),
    }
    (slider, *_) = [node for role, _, node in nodes if role == "slider"]
    properties = {prop["name"]: prop["value"].get("value") for prop in slider["properties"]}
    assert (slider["value"]["value"], properties["valuemax"]) == (113, 271)
    # Every control is a stop of the Tab key.
    stops = shown.ask(
        "() => [...document.querySelectorAll('a[href], button, input, summary, [tabindex=\"0\"]')]"
        ".filter(it => it.checkVisibility() && it.tabIndex >= 0).length"
    )
    shown.ask(
        "() => { window.stops = new Set(); document.addEventListener('focusin', (event) => "
        "window.stops.add(event.target)); }"
    )
    for _ in range(stops + 2):
        shown.tab.keyboard.press("Tab")
    assert shown.ask("window.stops.size") == stops
