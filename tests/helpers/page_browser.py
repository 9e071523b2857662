"""Open a page in the machine's Chromium, and record its messages and requests."""

from __future__ import annotations

import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from helpers.sample_report import MODULE
from helpers.warm import HANGS

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARGUMENTS = [
    "--no-sandbox",  # Chromium refuses to run as root with its sandbox
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
]
SLOWEST = HANGS * 1000
"""ms after which the browser counts as hanging; its default of 30 s may pass on a busy machine"""
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}


class Shown:
    """A page in a tab; ``said`` has its messages and errors, ``asked`` the requested URLs."""

    def __init__(self, tab, url):
        self.tab = tab
        tab.set_default_timeout(SLOWEST)
        self.said, self.asked = [], []
        tab.on("console", lambda message: self.said.append(message.text))
        tab.on("pageerror", lambda error: self.said.append(str(error)))
        tab.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        tab.on("request", lambda request: self.asked.append(request.url))
        self.go(url)

    def go(self, url):
        self.url = url
        self.tab.goto("about:blank")
        self.asked.clear()
        self.tab.goto(url)
        self.tab.wait_for_selector("html[data-ready]")

    def cpu_seconds(self, act):
        """CPU seconds of the page's main thread while ``act`` runs."""
        session = self.tab.context.new_cdp_session(self.tab)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def worked():
            metrics = session.send("Performance.getMetrics")["metrics"]
            return next(it["value"] for it in metrics if it["name"] == "TaskDuration")

        before = worked()
        act()
        seconds = worked() - before
        session.detach()
        return seconds

    def column(self, number):
        """The displayed texts of a column; column 0 has the tests' names."""
        cells = f"#rows tr > :nth-child({number + 1})"
        texts = self.tab.eval_on_selector_all(
            cells, "them => them.map(it => (it.querySelector('a.name') ?? it).innerText)"
        )
        return [text.replace(f"{MODULE}::", "").strip() for text in texts]

    def ask(self, code):
        return self.tab.evaluate(code)

    @property
    def sections(self):
        return self.tab.eval_on_selector_all("section.result", "them => them.map(it => it.id)")

    @property
    def focused(self):
        return self.ask("document.activeElement.id")

    def sorted_by(self):
        return self.ask(
            "[...document.querySelectorAll('th[aria-sort]')]"
            ".map(it => [it.innerText.split(/\\s/)[0], it.getAttribute('aria-sort')])"
        )


@contextmanager
def served(folder):
    """Serve a folder over HTTP; ``asked`` has the paths that were requested."""
    asked = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    running = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield SimpleNamespace(address=f"http://127.0.0.1:{running.server_port}", asked=asked)
    running.shutdown()
    running.server_close()


COLOURS = """
() => {
  const channel = (v) => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const parse = (text) => {
    const [r, g, b, a] = text.match(/[\\d.]+/g).map(Number);
    return a === 0 ? null : .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  };
  const behind = (it) => {
    for (; it; it = it.parentElement) {
      const found = parse(getComputedStyle(it).backgroundColor);
      if (found !== null) return found;
    }
    return 1;
  };
  const poor = [];
  for (const it of document.querySelectorAll("body *:not(script):not(svg *)")) {
    const own = [...it.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || !it.checkVisibility()) continue;
    const [a, b] = [parse(getComputedStyle(it).color), behind(it)];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < 4.5) poor.push([it.className, it.textContent.slice(0, 40), ratio.toFixed(2)]);
  }
  return poor;
}
"""
"""Returns texts with too little contrast to their background (WCAG 2, level AA), with the ratio."""
