// The charts: canvases over steps (x) and bytes (y). Both share their window of steps. `app` is what the page shows, see below.

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name); }
function clamp(x, low, high) { return Math.max(low, Math.min(high, x)); }

class Panel {
  constructor(place, label) {
    this.canvas = document.getElementById(place).appendChild(document.createElement("canvas"));
    const c = this.canvas;
    c.tabIndex = 0;
    for (const [name, value] of Object.entries({ role: "slider", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": app.numSteps - 1, "aria-valuenow": 0 }))
      c.setAttribute(name, value);
    this.left = 68; this.w = this.h = 1;  // of the inner part, in pixels; draw() knows them
    this.setTop(1);
    c.addEventListener("wheel", e => this.wheel(e), { passive: false });
    c.addEventListener("pointerdown", e => { if (e.button === 0) this.press = { x: e.offsetX, y: e.offsetY, moved: false }; });
    c.addEventListener("pointermove", e => this.pointer(e));
    c.addEventListener("pointerup", e => { if (this.press && !this.press.moved) this.pick(this.step(e.offsetX), this.bytes(e.offsetY)); this.press = null; });
    c.addEventListener("pointercancel", () => { this.press = null; });
    c.addEventListener("pointerleave", () => { hideTip(); this.press = null; });
    c.addEventListener("dblclick", () => app.showAll());
    c.addEventListener("keydown", e => { if (!e.ctrlKey && !e.metaKey && !e.altKey && this.key(e.key, e.shiftKey)) e.preventDefault(); });
    for (const event of ["focus", "blur"]) c.addEventListener(event, () => this.later());
    new ResizeObserver(() => this.later()).observe(c);
  }
  setTop(bytes) { this.top = bytes || 1; this.y = [0, this.top]; }
  step(px) { return app.x[0] + (px - this.left) / this.w * (app.x[1] - app.x[0]); }
  bytes(py) { return this.y[1] - py / this.h * (this.y[1] - this.y[0]); }
  px(step) { return this.left + (step - app.x[0]) / (app.x[1] - app.x[0]) * this.w; }
  py(bytes) { return (this.y[1] - bytes) / (this.y[1] - this.y[0]) * this.h; }

  wheel(e) {
    if (!e.ctrlKey && !e.metaKey) return;  // the page scrolls
    e.preventDefault();
    const factor = Math.exp(clamp(e.deltaY / 300, -1, 1));
    app.x = zoomed(app.x, factor, this.step(e.offsetX), app.numSteps, 4);
    if (this.zoomsBytes) this.y = zoomed(this.y, factor, this.bytes(e.offsetY), this.top, this.top / 1e6);
    hideTip();
    app.draw();
  }
  pointer(e) {
    const press = this.press;
    if (press && (press.moved || Math.hypot(e.offsetX - press.x, e.offsetY - press.y) > 4)) {
      if (!press.moved) { press.moved = true; this.canvas.setPointerCapture(e.pointerId); }
      app.x = moved(app.x, (press.x - e.offsetX) / this.w * (app.x[1] - app.x[0]), app.numSteps);
      this.y = moved(this.y, (e.offsetY - press.y) / this.h * (this.y[1] - this.y[0]), this.top);
      press.x = e.offsetX; press.y = e.offsetY;
      hideTip(); app.draw();
    } else if (e.pointerType !== "touch") {
      const s = this.step(e.offsetX), inside = s >= 0 && s < app.numSteps && e.offsetX >= this.left && e.offsetY < this.h;
      const text = inside ? this.tell(s, this.bytes(e.offsetY)) : null;
      text ? showTip(e, text) : hideTip();
    }
  }
  key(key, far) {
    const page = Math.max(1, Math.round((app.x[1] - app.x[0]) / 20)), run = this.run;
    const by = { ArrowLeft: far ? -10 : -1, ArrowRight: far ? 10 : 1, PageUp: -page, PageDown: page }[key];
    const to = { Home: 0, End: run.numSteps - 1, p: run.peakStep, P: run.peakStep }[key];
    if (by !== undefined) this.goTo(app.cursor + by);
    else if (to !== undefined) this.goTo(to);
    else if (key === "+" || key === "=") app.zoom(.5);
    else if (key === "-") app.zoom(2);
    else if (key === "0") app.showAll();
    else if (key === "Enter" || key === " ") this.enter();
    else if (key === "Escape") app.selection || app.matches ? app.letGo() : app.showAll();
    else return false;
    return true;
  }
  goTo(step) {
    app.cursor = clamp(step, 0, Math.max(0, this.run.numSteps - 1));
    app.reveal(app.cursor, app.cursor + 1);
    this.told();
    app.draw();
  }
  told() { this.canvas.setAttribute("aria-valuenow", app.cursor); this.canvas.setAttribute("aria-valuetext", this.saying()); }

  later() { if (!this.waiting) { this.waiting = true; requestAnimationFrame(() => { this.waiting = false; this.draw(); }); } }
  draw() {
    const { clientWidth, clientHeight } = this.canvas, scale = window.devicePixelRatio || 1, c = this.canvas.getContext("2d"), left = this.left;
    if (!clientWidth) return;
    const w = this.w = Math.max(1, clientWidth - left - 1), h = this.h = clientHeight - 22;
    const wide = Math.round(clientWidth * scale), high = Math.round(clientHeight * scale);
    if (this.canvas.width !== wide || this.canvas.height !== high) { this.canvas.width = wide; this.canvas.height = high; }
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, clientWidth, clientHeight);
    this.axes(c);
    c.save(); c.beginPath(); c.rect(left, 0, w, h); c.clip();
    this.paint(c); this.cursor(c);
    c.restore();
    c.strokeStyle = style("--line"); c.lineWidth = 1; c.strokeRect(left + .5, .5, w - 1, h - 1);
  }
  axes(c) {
    const { left, w, h } = this, k = unitOf(this.y[1]), unit = 1024 ** k;
    c.fillStyle = style("--soft"); c.strokeStyle = style("--grid"); c.lineWidth = 1;
    c.font = "11px system-ui, sans-serif"; c.textAlign = "right"; c.textBaseline = "middle";
    const values = ticks(this.y[0] / unit, this.y[1] / unit, Math.max(2, Math.floor(h / 38)));
    const digits = values.length > 1 ? clamp(Math.ceil(-Math.log10(values[1] - values[0]) - 1e-9), 0, 9) : 0;
    for (const value of values) {
      const y = Math.round(this.py(value * unit)) + .5;
      c.beginPath(); c.moveTo(left, y); c.lineTo(left + w, y); c.stroke();
      c.fillText(value ? `${value.toFixed(digits)} ${UNITS[k]}` : "0", left - 6, clamp(y, 6, h - 5));
    }
    c.textBaseline = "top";
    const steps = ticks(app.x[0], app.x[1], Math.max(2, Math.floor(w / 75)), 1);
    for (const value of steps) {
      const x = this.px(value), text = (value === steps[0] ? "step " : "") + count(value), half = c.measureText(text).width / 2;
      c.beginPath(); c.moveTo(Math.round(x) + .5, 0); c.lineTo(Math.round(x) + .5, h + 3); c.stroke();
      c.textAlign = "left";
      c.fillText(text, clamp(x - half, left, left + w - 2 * half), h + 6);
    }
  }
  // The step that is selected, and where the keys are.
  cursor(c) {
    const at = app.selection, isHere = document.activeElement === this.canvas;
    c.strokeStyle = style("--accent"); c.lineWidth = 1.5;
    for (const step of [at && at.run === this.run ? at.step : undefined, isHere ? app.cursor : undefined]) {
      if (step === undefined) continue;
      const x = this.px(step + .5);
      c.beginPath(); c.moveTo(x, 0); c.lineTo(x, this.h); c.stroke();
      c.setLineDash([2, 3]);  // of the keys
    }
    c.setLineDash([]);
  }
}

function zoomed([low, high], factor, at, most, least) {
  const span = clamp((high - low) * factor, Math.min(most, least), most), share = (at - low) / (high - low);
  const start = clamp(at - share * span, 0, most - span);
  return [start, start + span];
}
function moved([low, high], by, most) {
  const shift = clamp(by, -low, most - high);
  return [low + shift, high + shift];
}

// The bytes of every kind over the steps of the run that is shown, and those of the other one as a line.
class Timeline extends Panel {
  get run() { return app.run; }
  get other() { return app.run === app.after ? app.before : app.after; }
  // For every column of pixels that has steps: of those, the one with the most bytes.
  columns(run) {
    const found = [];
    for (let x = 0; x < this.w; x++) {
      const from = Math.max(0, Math.floor(this.step(this.left + x)));
      if (from >= run.numSteps) break;
      const to = Math.min(run.numSteps, Math.ceil(this.step(this.left + x + 1)));
      let most = from;
      for (let s = from + 1; s < to; s++) if (run.total[s] > run.total[most]) most = s;
      found.push(most);
    }
    return found;
  }
  paint(c) {
    const { left, h, run, other } = this, columns = this.columns(run), sum = new Float64Array(columns.length);
    run.live.forEach((live, k) => {
      c.fillStyle = COLORS[k];
      columns.forEach((s, x) => {
        if (!live[s]) return;
        const low = this.py(sum[x]), high = this.py(sum[x] += live[s]);
        c.fillRect(left + x, high, 1.5, low - high + .5);
      });
    });
    c.lineJoin = "round";
    c.beginPath();
    this.columns(other).forEach((s, x) => { const y = this.py(other.total[s]); c.lineTo(left + x, y); c.lineTo(left + x + 1, y); });
    for (const [color, width] of [["--ground", 3.5], ["--ink", 1.6]]) { c.strokeStyle = style(color); c.lineWidth = width; c.stroke(); }
    if (app.matches) {
      c.fillStyle = style("--accent");
      for (const s of app.matches.steps) c.fillRect(this.px(s), h - 7, Math.max(1.5, this.px(s + 1) - this.px(s)), 7);
    }
    const at = app.selection;
    if (at && at.run === run && at.block !== undefined) {  // its life
      c.fillStyle = style("--veil");
      c.fillRect(this.px(run.first[at.block]), 0, Math.max(2, this.px(run.last[at.block]) - this.px(run.first[at.block])), h);
    }
    this.peaks(c);
  }
  peaks(c) {
    const rows = [app.before, app.after].map(run => ({ y: this.py(run.peak), text: `${human(run.peak)} ${run.name}` })).sort((a, b) => a.y - b.y);
    const apart = rows[1].y - rows[0].y;
    c.font = "600 11px system-ui, sans-serif"; c.textAlign = "right"; c.textBaseline = "middle"; c.lineWidth = 1;
    rows.forEach((row, i) => {
      c.strokeStyle = style("--ink"); c.setLineDash([3, 4]);
      c.beginPath(); c.moveTo(this.left, row.y); c.lineTo(this.left + this.w, row.y); c.stroke(); c.setLineDash([]);
      const y = i && apart < 17 ? rows[0].y + 11 : Math.max(9, row.y - 10), right = this.left + this.w - 8, wide = c.measureText(row.text).width;
      c.fillStyle = style("--tip"); c.fillRect(right - wide - 4, y - 7, wide + 8, 14);
      c.fillStyle = style("--ink"); c.fillText(row.text, right, y);
    });
  }
  tell(at) {
    const s = Math.floor(at), { run, other } = this;
    const rows = data.kinds.map((_, k) => run.live[k] && run.live[k][s] ? `  ${kindName(k)}: ${human(run.live[k][s])}` : null).filter(row => row).reverse();
    const there = s < run.numSteps ? [`step ${count(s)}: ${run.opName(s)}`, `${human(run.total[s])} ${run.name}`, ...rows] : [`step ${count(s)}`];
    return [...there, ...(s < other.numSteps ? [`${human(other.total[s])} ${other.name}`] : [])].join("\n");
  }
  saying() { const s = app.cursor; return `step ${s}, ${this.run.opName(s)}, ${human(this.run.total[s])}`; }
  pick(at) { const s = Math.floor(at); if (s >= 0 && s < this.run.numSteps) app.select({ run: this.run, step: s }); }
  enter() { app.select({ run: this.run, step: app.cursor }); }
}

// The arena of the planned step: what lies in it, when and where.
class Arena extends Panel {
  constructor(place, label) {
    super(place, label);
    this.blocks = [];
    for (let i = 0; i < this.run.numBlocks; i++) if (this.run.offset[i] < data.arena_bytes) this.blocks.push(i);
    this.setTop(data.arena_bytes);
    this.block = -1;  // where the keys are
  }
  get zoomsBytes() { return true; }
  get run() { return app.after; }
  box(i) {
    const run = this.run, x = this.px(run.first[i]), y = this.py(run.offset[i] + run.size[i]);
    return [x, y, this.px(run.last[i]) - x, this.py(run.offset[i]) - y];
  }
  paint(c) {
    const run = this.run, [x0, x1] = app.x, [y0, y1] = this.y, found = app.matches && app.run === run ? app.matches.isBlock : null, named = [];
    c.strokeStyle = style("--ground");
    for (const i of this.blocks) {
      if (run.last[i] <= x0 || run.first[i] >= x1 || run.offset[i] >= y1 || run.offset[i] + run.size[i] <= y0) continue;
      const [x, y, wide, high] = this.box(i);
      c.globalAlpha = found && !found[i] ? .18 : 1;
      c.fillStyle = COLORS[run.kind[i]];
      c.fillRect(x, y, Math.max(wide, .6), Math.max(high, .4));
      if (wide > 3 && high > 3) { c.lineWidth = wide > 8 && high > 8 ? 1 : .5; c.strokeRect(x, y, wide, high); }
      if (wide > 34 && high > 13) named.push([i, x, y, wide, high]);
    }
    c.globalAlpha = 1; c.fillStyle = "#101418"; c.font = "11px system-ui, sans-serif"; c.textAlign = "left"; c.textBaseline = "top";
    for (const [i, left, y, wide, high] of named) {
      if (found && !found[i]) continue;
      const x = Math.max(left, this.left), room = Math.min(left + wide, this.left + this.w) - x - 8, name = fitted(c, run.blockName(i), room);
      if (!name) continue;
      const two = high > 30 && c.measureText(human(run.size[i])).width < room, middle = clamp(y + high / 2, 8, this.h - 8);
      c.fillText(name, x + 4, middle - (two ? 13 : 6));
      if (two) c.fillText(human(run.size[i]), x + 4, middle + 1);
    }
    const at = app.selection;
    c.strokeStyle = style("--ink"); c.lineWidth = 2.5;
    if (at && at.run === run && at.block !== undefined && run.offset[at.block] < data.arena_bytes) this.outline(c, at.block);
    c.setLineDash([4, 3]); c.lineWidth = 2;
    if (document.activeElement === this.canvas && this.block >= 0) this.outline(c, this.block);
    c.setLineDash([]);
  }
  outline(c, i) { const [x, y, wide, high] = this.box(i); c.strokeRect(x, y, Math.max(wide, 2), Math.max(high, 2)); }
  under(at, bytes) {
    const run = this.run;
    return this.blocks.find(i => run.first[i] <= at && run.last[i] > at && run.offset[i] <= bytes && run.offset[i] + run.size[i] > bytes) ?? -1;
  }
  // The blocks of a step from the lowest place on.
  column(s) {
    const run = this.run;
    return this.blocks.filter(i => run.first[i] < s + 1 && run.last[i] > s).sort((a, b) => run.offset[a] - run.offset[b] || run.first[a] - run.first[b]);
  }
  key(key, far) {
    if (key !== "ArrowUp" && key !== "ArrowDown") return super.key(key, far);
    const column = this.column(app.cursor), now = column.indexOf(this.block);
    if (column.length) this.block = column[now < 0 ? 0 : clamp(now + (key === "ArrowUp" ? 1 : -1), 0, column.length - 1)];
    this.told();
    app.draw();
    return true;
  }
  goTo(step) {
    const before = this.block, to = clamp(step, 0, Math.max(0, this.run.numSteps - 1));
    if (before >= 0 && !(this.run.first[before] < to + 1 && this.run.last[before] > to)) {
      const near = this.column(to), place = this.run.offset[before];
      this.block = near.length ? near.reduce((best, i) => Math.abs(this.run.offset[i] - place) < Math.abs(this.run.offset[best] - place) ? i : best) : -1;
    }
    super.goTo(step);
  }
  describe(i) {
    const run = this.run;
    return [run.blockName(i), `${kindName(run.kind[i])}, ${human(run.size[i])} at ${human(run.offset[i])}`, `steps ${run.steps(i)}`];
  }
  tell(at, bytes) { const i = this.under(at, bytes); return i < 0 ? null : this.describe(i).join("\n"); }
  saying() { return `step ${app.cursor}, ${this.block < 0 ? "no block" : this.describe(this.block).join(", ")}`; }
  pick(at, bytes) {
    const i = this.under(at, bytes);
    if (i < 0) { app.letGo(); return; }
    app.cursor = Math.floor(at); this.block = i;
    app.select({ run: this.run, block: i });
  }
  enter() { if (this.block >= 0) app.select({ run: this.run, block: this.block }); }
}

// As much of a text as fits; empty where that is next to nothing.
function fitted(c, text, room) {
  if (c.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) { const mid = (low + high + 1) >> 1; c.measureText(text.slice(0, mid) + "…").width <= room ? low = mid : high = mid - 1; }
  return low > 2 ? text.slice(0, low) + "…" : "";
}

const tip = document.getElementById("tip");
function hideTip() { tip.style.display = "none"; }
function showTip(e, text) {
  tip.textContent = text; tip.style.display = "block";
  tip.style.left = clamp(e.clientX + 14, 4, Math.max(4, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = clamp(e.clientY + 14, 4, Math.max(4, innerHeight - tip.offsetHeight - 8)) + "px";
}
