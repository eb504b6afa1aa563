// The data of the page: two runs, before and after, each with its ops, its blocks of memory and the bytes of every step.

const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#4e79a7", "#76b7b2", "#9c755f", "#bab0ac", "#d4a6c8", "#59a14f", "#f28e2b", "#edc948", "#af7aa1", "#e15759"];
const TYPES = { u: Uint32Array, d: Float64Array, b: Uint8Array };
const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];
const NONE = 2 ** 32 - 1;  // no op

function column(text, type) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new TYPES[type](bytes.buffer);
}
function unitOf(n) {
  let k = 0;
  while (n >= 1024 && k < UNITS.length - 1) { n /= 1024; k++; }
  return k;
}
function human(n) {
  const k = unitOf(n);
  return (k ? (n / 1024 ** k).toFixed(2) : n) + " " + UNITS[k];
}
function count(n) { return n.toLocaleString("en"); }
function kindName(k) { return data.kinds[k].replace("_", " "); }

// The least of 1, 2, 5, 10, 20, 50, ... that cuts a span into at most so many parts.
function roundStep(span, most) {
  const power = 10 ** Math.floor(Math.log10(span / most));
  return [1, 2, 5, 10].map(m => m * power).find(step => span / step <= most * 1.0001);
}
function ticks(low, high, most, least = 0) {
  const step = Math.max(least, roundStep(high - low, most)), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12); i++) found.push(i * step + 0);
  return found;
}

const SITES = { module: column(data.given.module, "u"), source: column(data.given.source, "u") };

class Run {
  constructor(name, of, given) {
    this.name = name; this.of = of;
    this.numSteps = given.num_steps;
    this.op = column(given.op, "u"); this.opKind = column(given.op_kind, "b");
    this.given = column(given.given, "u");
    this.remark = given.remark ? column(given.remark, "b") : new Uint8Array(this.numSteps);
    this.first = column(given.first, "d"); this.last = column(given.last, "d");
    this.size = column(given.size, "d"); this.offset = column(given.offset, "d");
    this.kind = column(given.kind, "b"); this.label = column(given.label, "u"); this.maker = column(given.maker, "u");
    this.numBlocks = this.size.length;
    this.sum();
  }

  // For every step: its moment with the most bytes, and what lies in memory then, by kind.
  sum() {
    const n = this.numSteps, num = this.numBlocks, events = new Uint32Array(2 * num);  // begins, then ends
    for (let i = 0; i < 2 * num; i++) events[i] = i;
    const time = i => i < num ? this.first[i] : this.last[i - num];
    events.sort((a, b) => time(a) - time(b) || (b >= num) - (a >= num));
    this.live = data.kinds.map(() => new Float64Array(n));
    this.total = new Float64Array(n); this.moment = new Float64Array(n);
    const now = new Float64Array(data.kinds.length);
    for (let s = 0, e = 0, sum = 0; s < n; s++) {
      for (let at = s, isFirst = true; ; isFirst = false) {
        for (; e < events.length && time(events[e]) <= at; e++) {
          const i = events[e], block = i % num, change = i < num ? this.size[block] : -this.size[block];
          now[this.kind[block]] += change; sum += change;
        }
        if (isFirst || sum > this.total[s]) {
          this.total[s] = sum; this.moment[s] = at;
          for (let k = 0; k < now.length; k++) this.live[k][s] = now[k];
        }
        if (e >= events.length || time(events[e]) >= s + 1) break;
        at = time(events[e]);
      }
    }
    this.peakStep = this.total.reduce((best, sum, s) => sum > this.total[best] ? s : best, 0);
    this.peak = n ? this.total[this.peakStep] : 0;
  }

  opName(s) { return data.texts[this.op[s]]; }
  blockName(i) { return data.texts[this.label[i]]; }
  site(s, what) { return s < this.numSteps && this.given[s] !== NONE ? data.texts[SITES[what][this.given[s]]] : ""; }
  lives(i) { return [Math.floor(this.first[i]), Math.max(Math.floor(this.first[i]), Math.ceil(this.last[i]) - 1)]; }
  steps(i) {
    const [from, to] = this.lives(i);
    return from === to ? count(from) : `${count(from)} to ${count(to)}`;
  }
  remarkOf(s) { return data.remarks[this.remark[s]]; }

  // The blocks at the moment of a step, the largest first.
  at(s) {
    const t = this.moment[s], found = [];
    for (let i = 0; i < this.numBlocks; i++) if (this.first[i] <= t && this.last[i] > t) found.push(i);
    return found.sort((a, b) => this.size[b] - this.size[a] || a - b);
  }

  // Steps and blocks of which every word is somewhere in the names, the operator, the module or the line.
  find(query) {
    const words = query.toLowerCase().split(/\s+/).filter(word => word);
    this.lower = this.lower || {
      sites: Array.from(this.op, (_, s) => `${this.opName(s)} ${this.site(s, "module")} ${this.site(s, "source")} ${this.remarkOf(s)}`.toLowerCase()),
    };
    const has = text => words.every(word => text.includes(word)), steps = [], blocks = [];
    for (let s = 0; s < this.numSteps; s++) if (has(this.lower.sites[s])) steps.push(s);
    for (let i = 0; i < this.numBlocks; i++) {
      const made = this.maker[i] === NONE ? "" : this.lower.sites[this.maker[i]];
      if (has(`${this.blockName(i)} ${data.kinds[this.kind[i]]} ${made}`.toLowerCase())) blocks.push(i);
    }
    return { steps, blocks };
  }
}
