// What the page shows, and what its parts do: legend, list of the largest tensors, search, selection.

const MOST_ROWS = 15, MOST_HITS = 60;
const by = id => document.getElementById(id);

function element(tag, parent, text, attributes = {}) {
  const made = parent.appendChild(document.createElement(tag));
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
function swatch(parent, k) { element("i", parent).style.background = COLORS[k]; }
function link(parent, text, selection) {
  const made = element("button", parent, text, { type: "button", class: "link" });
  made.addEventListener("click", () => app.select(selection));
  return made;
}

const app = {
  before: new Run("in program order", "program order", data.before),
  after: new Run("as planned", "as planned", data.after),
  x: [0, 1], cursor: 0, selection: null, matches: null,

  start() {
    this.run = this.after;
    this.numSteps = Math.max(1, this.before.numSteps, this.after.numSteps);
    this.cursor = this.after.peakStep;
    this.panels = [new Timeline("timeline", "Memory over the step")];
    this.panels[0].setTop(1.1 * Math.max(this.before.peak, this.after.peak));
    by("places").textContent = data.arena_bytes ? `Arena: where everything lies, ${human(data.arena_bytes)}` : "Arena: none";
    if (data.arena_bytes) this.panels.push(new Arena("arena", "Blocks of the arena"));
    else { by("none").hidden = false; by("none").textContent = data.no_arena; }
    this.panels.forEach(panel => panel.told());
    this.showAll();
    this.show(this.after);
  },
  draw() { this.panels.forEach(panel => panel.later()); },
  showAll() { this.x = [0, this.numSteps]; this.panels.forEach(panel => panel.setTop(panel.top)); this.draw(); },
  zoom(factor) {
    const [low, high] = this.x, inside = this.cursor >= low && this.cursor < high;
    this.x = zoomed(this.x, factor, inside ? this.cursor + .5 : (low + high) / 2, this.numSteps, 4);
    this.draw();
  },
  // Move what is zoomed so that it has the steps from one to another in it, or the first of them.
  reveal(from, to) {
    const [low, high] = this.x;
    if (from < low || to > high) this.x = moved(this.x, from < low ? from - low : Math.min(to - high, from - low), this.numSteps);
  },
  // Show a run in colours.
  show(run) {
    this.run = run;
    for (const name of ["after", "before"]) {
      by(name).setAttribute("aria-checked", this[name] === run);
      by(name).tabIndex = this[name] === run ? 0 : -1;
    }
    this.cursor = clamp(this.cursor, 0, Math.max(0, run.numSteps - 1));
    if (this.selection && this.selection.run !== run) this.selection = null;
    legend(); this.search(false); this.tell();
  },
  select(selection) {
    if (selection.run !== this.run) this.show(selection.run);
    this.selection = selection;
    const { run, block, step } = selection, [from, to] = block === undefined ? [step, step] : run.lives(block);
    if (this.cursor < from || this.cursor > to) this.cursor = from;
    if (block !== undefined && this.panels[1]) this.panels[1].block = block;
    this.reveal(from, to + 1);
    by("status").textContent = `Selected: ${block === undefined ? `step ${count(step)}, ${run.opName(step)}` : `${run.blockName(block)}, ${human(run.size[block])}`}`;
    this.tell();
  },
  letGo() {
    this.selection = null;
    if (this.matches) { by("query").value = ""; this.search(false); }
    by("status").textContent = "";
    this.tell();
  },
  tell() { selected(); largest(); this.panels.forEach(panel => panel.told()); this.draw(); },
  search(opens) {
    const query = by("query").value.trim();
    this.matches = query ? this.run.find(query) : null;
    if (this.matches) {
      const isBlock = this.matches.isBlock = new Uint8Array(this.run.numBlocks);
      for (const i of this.matches.blocks) isBlock[i] = 1;
      by("status").textContent = `${count(this.matches.steps.length)} ops, ${count(this.matches.blocks.length)} tensors`;
    }
    hits(opens);
    this.draw();
  },
};

function legend() {
  const place = by("legend");
  place.replaceChildren();
  data.kinds.forEach((_, k) => {
    if (!app.run.live[k].some(bytes => bytes)) return;
    const entry = element("span", place);
    swatch(entry, k); entry.append(kindName(k));
  });
  const entry = element("span", place);
  element("i", entry, undefined, { class: "line" }); entry.append(app.panels[0].other.name);
}

function row(list, name, value, selection) {
  if (!value) return;
  element("dt", list, name);
  const cell = element("dd", list, selection ? undefined : value);
  if (selection) link(cell, value, selection);
}
function siteRows(list, run, s) {
  row(list, "module", run.site(s, "module")); row(list, "line", run.site(s, "source")); row(list, "remark", run.remarkOf(s));
}
function selected() {
  const place = by("selected"), at = app.selection;
  place.replaceChildren();
  if (!at) { element("p", place, "Nothing. Click something in a chart or in the list, or search for it."); return; }
  const { run, block: i, step: s } = at;
  element("b", place, i === undefined ? run.opName(s) : run.blockName(i));
  const list = element("dl", place);
  if (i === undefined) {
    row(list, "step", `${count(s)} of ${count(run.numSteps)}, ${run.name}`);
    if (run.given[s] !== NONE && run.given[s] !== s) row(list, "given as", `op ${count(run.given[s])}`);
    row(list, "kind", kindName(run.opKind[s]).replace("made in ", "").replace("made by ", ""));
    siteRows(list, run, s);
    row(list, "memory", human(run.total[s]));
    for (let b = 0; b < run.numBlocks; b++) if (run.maker[b] === s) row(list, "takes", `${run.blockName(b)}, ${human(run.size[b])}`, { run, block: b });
    return;
  }
  const maker = run.maker[i], [from, to] = run.lives(i), isInside = run === app.after && run.offset[i] < data.arena_bytes;
  row(list, "kind", kindName(run.kind[i]));
  row(list, "size", `${human(run.size[i])} (${count(run.size[i])} bytes)`);
  if (data.arena_bytes && run === app.after) row(list, "place", isInside ? `at ${human(run.offset[i])} of the arena` : "outside the arena");
  row(list, "at the peak", run.first[i] <= run.moment[run.peakStep] && run.last[i] > run.moment[run.peakStep] ? `yes, ${(100 * run.size[i] / run.peak).toFixed(1)} % of it` : "no");
  row(list, "steps", run.steps(i));
  if (maker !== NONE) { row(list, "made by", run.opName(maker), { run, step: maker }); siteRows(list, run, maker); }
  if (to > from && to < run.numSteps) row(list, to === run.numSteps - 1 ? "at the end" : "last used by", run.opName(to), { run, step: to });
}

function largest() {
  const run = app.run, at = app.selection && app.selection.step !== undefined ? app.selection.step : run.peakStep, place = by("rows");
  const isPeak = at === run.peakStep, blocks = run.numSteps ? run.at(at) : [];
  by("largest").textContent = `Largest tensors at ${isPeak ? "the peak, " : ""}step ${count(at)}, ${run.name}`;
  place.replaceChildren();
  for (const i of blocks.slice(0, MOST_ROWS)) {
    const line = element("tr", place), maker = run.maker[i];
    element("td", line, human(run.size[i]), { class: "number" });
    const cell = element("div", element("td", line), undefined, { class: "named" });
    swatch(cell, run.kind[i]);
    const name = element("div", cell);
    link(name, run.blockName(i), { run, block: i });
    element("small", name, [kindName(run.kind[i]), run.site(maker, "module"), run.site(maker, "source")].filter(text => text).join(" · "));
    element("td", line, run.steps(i), { class: "number" });
    line.setAttribute("aria-current", !!app.selection && app.selection.block === i);
  }
  if (blocks.length > MOST_ROWS) {
    const rest = blocks.slice(MOST_ROWS), line = element("tr", place);
    element("td", line, human(rest.reduce((sum, i) => sum + run.size[i], 0)), { class: "number" });
    element("td", line, `${count(rest.length)} more`); element("td", line);
  }
}

function hits(opens) {
  const place = by("hits"), found = app.matches, run = app.run;
  place.replaceChildren();
  app.hit = -1;
  by("query").removeAttribute("aria-activedescendant");
  app.hits = found ? [...found.blocks.slice().sort((a, b) => run.size[b] - run.size[a]).slice(0, MOST_HITS / 2).map(block => ({ run, block })),
    ...found.steps.slice(0, MOST_HITS / 2).map(step => ({ run, step }))] : [];
  app.hits.forEach((hit, n) => {
    const { block, step } = hit, item = element("li", place, block === undefined ? `step ${count(step)}: ${run.opName(step)}` : run.blockName(block), { role: "option", id: `hit${n}`, "aria-selected": false });
    const s = block === undefined ? step : run.maker[block];
    element("small", item, [block === undefined ? "" : `${kindName(run.kind[block])}, ${human(run.size[block])}`, run.site(s, "module"), run.site(s, "source")].filter(text => text).join(" · "));
    item.addEventListener("pointerdown", e => { e.preventDefault(); take(n); });
  });
  const rest = found ? found.steps.length + found.blocks.length - app.hits.length : 0;
  if (found && !app.hits.length) element("li", place, "Nothing has this in its name, operator, module or line.");
  else if (rest > 0) element("li", place, `and ${count(rest)} more, marked in the charts`);
  setOpen(opens && !!found);
}
function setOpen(opens) { by("hits").hidden = !opens; by("query").setAttribute("aria-expanded", opens); }
function choose(n) {
  const old = by(`hit${app.hit}`), now = by(`hit${n}`);
  if (old) old.setAttribute("aria-selected", false);
  if (!now) return;
  app.hit = n;
  now.setAttribute("aria-selected", true); now.scrollIntoView({ block: "nearest" });
  by("query").setAttribute("aria-activedescendant", now.id);
}
function take(n) { setOpen(false); if (app.hits[n]) app.select(app.hits[n]); }

function wire() {
  by("in").addEventListener("click", () => app.zoom(.5));
  by("out").addEventListener("click", () => app.zoom(2));
  by("all").addEventListener("click", () => app.showAll());
  for (const name of ["after", "before"]) {
    by(name).addEventListener("click", () => app.show(app[name]));
    by(name).addEventListener("keydown", e => {
      if (!e.key.startsWith("Arrow")) return;
      e.preventDefault();
      const other = name === "after" ? "before" : "after";
      app.show(app[other]); by(other).focus();
    });
  }
  const query = by("query");
  query.addEventListener("input", () => app.search(true));
  query.addEventListener("focus", () => setOpen(!!app.matches));
  query.addEventListener("blur", () => setOpen(false));
  query.addEventListener("keydown", e => {
    if (e.key === "ArrowDown" || e.key === "ArrowUp") {
      setOpen(!!app.matches);
      choose(clamp(app.hit + (e.key === "ArrowDown" ? 1 : -1), 0, app.hits.length - 1));
    } else if (e.key === "Enter") take(Math.max(0, app.hit));
    else if (e.key === "Escape") app.letGo();
    else return;
    e.preventDefault();
  });
  by("rows").addEventListener("keydown", e => {
    const links = [...by("rows").querySelectorAll("button")], now = links.indexOf(document.activeElement);
    const to = { ArrowDown: now + 1, ArrowUp: now - 1 }[e.key];
    if (to === undefined || !links[to]) return;
    e.preventDefault();
    links[to].focus();
  });
  document.addEventListener("keydown", e => {
    const isText = e.target === query;
    if (e.key === "/" && !isText) { e.preventDefault(); query.focus(); }
    else if (e.key === "Escape" && !isText && e.target.tagName !== "CANVAS") app.letGo();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.draw());
}

document.title = data.title;
document.querySelector("h1").textContent = data.title;
for (const [name, value] of data.figures) {
  const pair = element("div", by("figures"));
  element("dt", pair, name); element("dd", pair, value);
}
app.start();
wire();
document.body.dataset.ready = "yes";
