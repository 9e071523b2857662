"use strict";
// Sorts, filters and opens. Rows and sections arrive escaped; the page's policy runs no other script.
(() => {
  const at = (id) => document.getElementById(id);
  const root = document.documentElement;

  // -- dark and light --

  const theme = at("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const remembered = (value) => {
    try {
      if (value === undefined) return localStorage.getItem("gpumem-theme");
      localStorage.setItem("gpumem-theme", value);
    } catch { /* a browser may keep nothing for files */ }
    return null;
  };
  const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  const known = remembered();
  if (known === "dark" || known === "light") root.dataset.theme = known;
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remembered(root.dataset.theme);
    label();
  });
  system.addEventListener("change", label);
  label();

  // -- timelines: a place told by pointer or keys, a stretch enlarged --

  const MIB = 2 ** 20, GIB = 2 ** 30;
  const sized = (bytes) => !bytes ? "0" : bytes < MIB ? `${(bytes / 1024).toFixed(2)} KiB`
    : bytes < 10 * GIB ? `${(bytes / MIB).toFixed(2)} MiB` : `${(bytes / GIB).toFixed(2)} GiB`;
  const make = (tag, name) => Object.assign(document.createElement(tag), { className: name });
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const levelAt = (changes, index) => {  // point, level, point, level ...
    let low = 0, high = changes.length / 2;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (changes[2 * middle] <= index) low = middle + 1; else high = middle;
    }
    return low ? changes[2 * low - 1] : 0;
  };
  const explorable = (svg) => {
    const data = JSON.parse(svg.dataset.timeline);
    const plot = svg.querySelector(".plot");
    const box = svg.viewBox.baseVal;
    const [left, top, width, height] = ["x", "y", "width", "height"].map((it) => Number(plot.getAttribute(it)));
    const depth = plot.viewBox.baseVal.height;
    const cursor = make("div", "cursor"), line = make("div", "at"), chosen = make("div", "chosen");
    const share = (value, whole) => `${100 * value / whole}%`;
    Object.assign(cursor.style, {
      left: share(left, box.width), width: share(width, box.width),
      top: share(top, box.height), height: share(height, box.height),
    });
    cursor.append(line, chosen);
    line.hidden = chosen.hidden = true;
    const hint = "arrow keys move, plus and minus zoom, P goes to the peak, Escape shows all";
    for (const [name, value] of Object.entries({
      role: "slider", tabindex: "0", "aria-label": `Place in the timeline: ${hint}`,
      "aria-valuemin": "1", "aria-valuemax": String(data.points), "aria-valuenow": String(data.peak + 1),
    })) cursor.setAttribute(name, value);
    svg.parentElement.append(cursor);
    const readout = make("div", "readout"), text = make("span", "line"), reset = make("button", "");
    reset.type = "button";
    reset.textContent = "Show all";
    reset.hidden = true;
    svg.closest("figure").querySelector("figcaption").before(readout);
    svg.closest("figure").querySelector("figcaption").hidden = true;  // the readout has its names
    let place = data.peak, start = 0, end = data.points, live = false;

    const names = Object.keys(data.columns).filter((name) => name !== "reserved");
    const tell = () => {
      const phase = data.phases.find(([, from, to]) => from <= place && place < to);
      const held = names.map((name) => [name, levelAt(data.columns[name], place) * data.unit]);
      const total = held.reduce((sum, [, bytes]) => sum + bytes, 0);
      const source = data.line.length ? data.lines[levelAt(data.line, place)] : undefined;
      const words = [`${place + 1} of ${data.points}`, phase ? phase[0] : "", source ?? ""].filter(Boolean).join(" · ");
      const sums = [["allocated", total], ["reserved", levelAt(data.columns.reserved, place) * data.unit]];
      if (data.ghost.length) sums.push(["baseline", data.ghost[Math.floor((place + .5) * data.ghost.length / data.points)]]);
      text.textContent = words;
      readout.replaceChildren(text, ...[...sums, ...held].map(([name, bytes]) => {
        const item = make("span", "");
        const kind = { reserved: "line", baseline: "ghost-line" }[name] ?? (names.includes(name) ? name.replaceAll(" ", "-") : "");
        if (kind) item.append(make("span", `swatch ${kind}`));
        item.append(`${name} ${sized(bytes)}`);
        return item;
      }), reset);
      cursor.setAttribute("aria-valuenow", String(place + 1));
      cursor.setAttribute("aria-valuetext",
        [words, ...[...sums, ...held].filter(([, bytes]) => bytes).map(([name, bytes]) => `${name} ${sized(bytes)}`)].join(", "));
      line.hidden = !live || place < start || place >= end;
      line.style.left = share(place + .5 - start, end - start);
    };
    const zoom = (from, to) => {
      const span = clamp(Math.round(to - from), Math.min(8, data.points), data.points);
      start = clamp(Math.round(from), 0, data.points - span);
      end = start + span;
      plot.setAttribute("viewBox", `${start} 0 ${span} ${depth}`);
      reset.hidden = span === data.points;
      const xOf = (index) => left + width * (index - start) / span;
      for (const label of svg.querySelectorAll(".at-point")) {
        const index = Number(label.dataset.index);
        const shift = xOf(index + .5) - (left + width * (index + .5) / data.points);
        label.setAttribute("transform", `translate(${shift} 0)`);
        label.toggleAttribute("hidden", index < start || index >= end);
      }
      let free = -Infinity;
      for (const label of svg.querySelectorAll(".phase-name")) {
        label.dataset.x ??= label.getAttribute("x");
        const [from, to] = [label.dataset.start, label.dataset.end].map((it) => clamp(xOf(Number(it)), left, left + width));
        const x = span === data.points ? Number(label.dataset.x) : (from + to) / 2;
        const half = label.textContent.length * 2.9;
        const room = span === data.points || (to > from && x - half >= free && x - half >= left - 2 && x + half <= left + width + 2);
        label.setAttribute("x", x);
        label.style.visibility = room ? "" : "hidden";
        if (room) free = x + half + 4;
      }
      tell();
    };
    const indexOf = (event) => {
      const area = cursor.getBoundingClientRect();
      return start + (event.clientX - area.left) / area.width * (end - start);
    };
    let origin = null;
    cursor.addEventListener("pointermove", (event) => {
      live = true;
      place = clamp(Math.floor(indexOf(event)), 0, data.points - 1);
      if (origin !== null) {
        const [from, to] = [origin, indexOf(event)].sort((a, b) => a - b);
        chosen.hidden = false;
        chosen.style.left = share(from - start, end - start);
        chosen.style.width = share(to - from, end - start);
      }
      tell();
    });
    cursor.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button) return;
      origin = indexOf(event);
      cursor.setPointerCapture(event.pointerId);
    });
    cursor.addEventListener("pointerup", (event) => {
      const [from, to] = [origin, indexOf(event)].sort((a, b) => a - b);
      const moved = origin !== null && (to - from) / (end - start) > .01;
      origin = null;
      chosen.hidden = true;
      if (moved) zoom(Math.floor(from), Math.ceil(to));
    });
    cursor.addEventListener("pointercancel", () => { origin = null; chosen.hidden = true; });
    cursor.addEventListener("dblclick", () => zoom(0, data.points));
    reset.addEventListener("click", () => { zoom(0, data.points); cursor.focus(); });
    cursor.addEventListener("focus", () => { live = true; tell(); });
    cursor.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const pace = event.shiftKey ? Math.max(1, Math.round((end - start) / 10)) : 1;
      const goto = (index) => {
        place = clamp(index, 0, data.points - 1);
        const span = end - start;
        if (place < start || place >= end) zoom(place - span / 2, place + span / 2); else tell();
      };
      const scale = (factor) => {
        const span = (end - start) * factor;
        zoom(place - span / 2, place + span / 2);
      };
      const action = {
        ArrowLeft: () => goto(place - pace), ArrowRight: () => goto(place + pace),
        ArrowDown: () => goto(place - pace), ArrowUp: () => goto(place + pace),
        PageDown: () => goto(place - 10 * pace), PageUp: () => goto(place + 10 * pace),
        Home: () => goto(0), End: () => goto(data.points - 1), p: () => goto(data.peak), P: () => goto(data.peak),
        "+": () => scale(.5), "=": () => scale(.5), "-": () => scale(2), Escape: () => zoom(0, data.points),
        0: () => zoom(0, data.points),
      }[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    });
    tell();
  };

  // -- commands --

  const copied = async (button) => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      if (!document.execCommand("copy")) return;
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  const enliven = (within) => {
    for (const button of within.querySelectorAll("button.copy")) {
      button.hidden = false;
      button.addEventListener("click", () => copied(button));
    }
    for (const svg of within.querySelectorAll("svg.timeline")) explorable(svg);
  };
  enliven(document);
  if (!at("table")) {
    root.dataset.ready = "yes";
    return;
  }

  // -- the table --

  const table = at("table"), body = at("rows"), search = at("search"), failures = at("failures");
  const heads = [...table.querySelectorAll("thead th")];
  const order = new Intl.Collator(undefined, { numeric: true });
  const entries = [...body.rows].map((row, place) => {
    const keys = JSON.parse(row.dataset.keys);
    const { cause, group } = row.dataset;
    const text = [keys[0], keys[1], row.lastElementChild.textContent, cause ?? ""].join(" ").toLowerCase();
    return { row, place, keys, group, text, failed: row.classList.contains("failed") };
  });
  let sorted = [];
  let column = heads.length - 1, descending = false;

  const compare = (a, b) => {
    const [x, y] = [a.keys[column], b.keys[column]];
    if (x === null || y === null) return (x === null) - (y === null);
    const way = typeof x === "string" ? order.compare(x, y) : x - y;
    return descending ? -way : way;
  };
  const sort = () => { sorted = [...entries].sort((a, b) => compare(a, b) || a.place - b.place); };
  const chosen = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    return sorted.filter((it) => (it.failed || !failures.checked)
      && words.every((word) => it.text.includes(word)));
  };
  // Failures of one cause below its name, the cause of most of them first; then all other tests.
  const grouping = at("grouped");
  const inGroups = (found) => {
    const members = new Map();
    for (const it of found) {
      const group = it.group ?? "no failure";
      if (!members.has(group)) members.set(group, []);
      members.get(group).push(it);
    }
    const groups = [...members].sort(([a, x], [b, y]) =>
      (a === "no failure") - (b === "no failure") || y.length - x.length);
    return groups.flatMap(([group, its]) => its.map((it, index) => ({ it, head: index ? null : [group, its.length] })));
  };
  const headOf = ([group, number]) => {
    const row = document.createElement("tr"), cell = document.createElement("th"), count = document.createElement("small");
    row.className = "group";
    row.setAttribute("role", "row");
    for (const [name, value] of Object.entries({ role: "rowheader", scope: "rowgroup", colspan: heads.length })) cell.setAttribute(name, value);
    count.textContent = ` ${number} ${number === 1 ? "test" : "tests"}`;
    cell.append(group, count);
    row.append(cell);
    return row;
  };
  const draw = () => {
    const found = chosen();
    const placed = grouping?.checked ? inGroups(found) : found.map((it) => ({ it, head: null }));
    body.replaceChildren(...placed.flatMap(({ it, head }) => head ? [headOf(head), it.row] : [it.row]));
    heads.forEach((head, index) => {
      if (index === column) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    at("status").textContent = found.length === entries.length
      ? `${entries.length} in all` : `${found.length} of ${entries.length}`;
    at("none").hidden = found.length > 0;
    for (const it of document.querySelectorAll(".counts button")) {
      it.setAttribute("aria-pressed", String(search.value === it.dataset.word));
    }
  };
  const filtered = () => {
    draw();
    const state = new URLSearchParams();
    if (failures.checked) state.set("failures", "1");
    if (search.value) state.set("q", search.value);
    if (grouping?.checked) state.set("grouped", "1");
    const hash = state.toString();
    history.replaceState(null, "", hash ? `#${hash}` : "#tests");
  };

  // -- sections --

  const open = (id) => {
    const section = at(id);
    section.querySelector("details").open = true;
    section.scrollIntoView();
    at(`${id}-name`).focus({ preventScroll: true });
  };
  const follow = () => {
    const hash = location.hash.slice(1);
    if (at(hash)?.matches("section.result")) return open(hash);
    const state = new URLSearchParams(hash);
    if (state.has("failures") || state.has("q") || state.has("grouped")) {
      if (grouping) grouping.checked = state.has("grouped");
      failures.checked = state.has("failures");
      search.value = state.get("q") ?? "";
      draw();
    }
    return undefined;
  };

  for (const head of heads) {
    head.firstElementChild.addEventListener("click", (event) => {
      const chosenColumn = Number(event.currentTarget.dataset.column);
      const figures = entries.some((it) => typeof it.keys[chosenColumn] === "number");
      descending = chosenColumn === column
        ? !descending : figures && chosenColumn !== heads.length - 1;
      column = chosenColumn;
      sort();
      draw();
    });
  }
  search.addEventListener("input", filtered);
  failures.addEventListener("change", filtered);
  grouping?.addEventListener("change", filtered);
  at("filter").addEventListener("submit", (event) => event.preventDefault());
  for (const it of document.querySelectorAll(".counts button")) {
    it.addEventListener("click", () => {
      search.value = search.value === it.dataset.word ? "" : it.dataset.word;
      filtered();
    });
  }
  // A click on the test whose section is in the address already changes no address.
  body.addEventListener("click", (event) => {
    const link = event.target.closest("a.name");
    if (link && link.getAttribute("href") === location.hash) follow();
  });
  addEventListener("hashchange", follow);
  sort();
  draw();
  at("filter").hidden = false;
  // Before that the browser itself goes to the address's place, and takes the focus there.
  addEventListener("load", () => {
    follow();
    root.dataset.ready = "yes";
  });
})();
