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
  };
  enliven(document);
  if (!at("table")) {
    root.dataset.ready = "yes";
    return;
  }

  // -- what lies packed in the page --

  const unpacked = async (element) => {
    const letters = atob(JSON.parse(element.textContent));
    const bytes = Uint8Array.from(letters, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).json();
  };
  const packs = [...document.querySelectorAll("script.pack")];
  const sectionsOf = (number) => (packs[number].sections ??= unpacked(packs[number]));

  // -- the table --

  const START = 200;
  const table = at("table"), body = at("rows"), search = at("search"), failures = at("failures");
  const heads = [...table.querySelectorAll("thead th")];
  const order = new Intl.Collator(undefined, { numeric: true });
  let entries = [], byId = new Map(), sorted = [], limit = START;
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
  const draw = () => {
    const found = chosen();
    const shown = found.slice(0, limit);
    body.innerHTML = shown.map((it) => it.row).join("");
    heads.forEach((head, index) => {
      if (index === column) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    at("status").textContent = found.length === entries.length
      ? `${entries.length} in all` : `${found.length} of ${entries.length}`;
    at("none").hidden = found.length > 0;
    at("more").hidden = shown.length === found.length;
    for (const it of document.querySelectorAll(".counts button")) {
      it.setAttribute("aria-pressed", String(search.value === it.dataset.word));
    }
  };
  const filtered = () => {
    limit = START;
    draw();
    const state = new URLSearchParams();
    if (failures.checked) state.set("failures", "1");
    if (search.value) state.set("q", search.value);
    const hash = state.toString();
    history.replaceState(null, "", hash ? `#${hash}` : "#tests");
  };

  // -- sections --

  const open = async (entry) => {
    let section = at(entry.id);
    if (!section) {
      const html = (await sectionsOf(entry.pack))[entry.id];
      section = at(entry.id);
      if (!section) {
        const holder = document.createElement("template");
        holder.innerHTML = html;
        section = holder.content.querySelector("section");
        enliven(section);
        const there = [...at("sections").querySelectorAll(":scope > section")];
        const next = there.find((it) => byId.get(it.id).place > entry.place);
        at("sections").insertBefore(section, next ?? null);
      }
    }
    section.scrollIntoView();
    at(`${entry.id}-name`).focus({ preventScroll: true });
  };
  const follow = () => {
    const hash = location.hash.slice(1);
    if (byId.has(hash)) return open(byId.get(hash));
    const state = new URLSearchParams(hash);
    if (state.has("failures") || state.has("q")) {
      failures.checked = state.has("failures");
      search.value = state.get("q") ?? "";
      limit = START;
      draw();
    }
    return undefined;
  };

  const begin = async () => {
    entries = await unpacked(at("index"));
    const plain = document.createElement("template");
    entries.forEach((it, place) => {
      it.place = place;
      plain.innerHTML = it.row.slice(it.row.lastIndexOf("<td"));
      it.text = `${it.keys[0]} ${it.keys[1]} ${plain.content.textContent}`.toLowerCase();
    });
    byId = new Map(entries.map((it) => [it.id, it]));
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
    at("filter").addEventListener("submit", (event) => event.preventDefault());
    for (const it of document.querySelectorAll(".counts button")) {
      it.addEventListener("click", () => {
        search.value = search.value === it.dataset.word ? "" : it.dataset.word;
        filtered();
      });
    }
    for (const it of at("more").children) {
      it.addEventListener("click", () => {
        limit = it.dataset.more === "all" ? Infinity : limit + Number(it.dataset.more);
        draw();
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
    await follow();
    root.dataset.ready = "yes";
  };
  begin();
})();
