// Draw the charts with uPlot: raw values faint, smoothed values on top, one crosshair and one zoom for all.
"use strict";
(() => {
  const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
  const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((e) => [1, 2, 5].map((m) => m * 10 ** e)); // steps are whole numbers
  const SYNC = uPlot.sync("run");
  let cards = [], own = [];
  let smoothing = 0;

  // Exponential mean with the start's bias removed; gaps stay gaps.
  const smooth = (values, weight) => {
    if (!weight) return values;
    let mean = 0, norm = 0;
    return values.map((v) => {
      if (v === null) return null;
      mean = weight * mean + (1 - weight) * v;
      norm = weight * norm + (1 - weight);
      return mean / norm;
    });
  };

  const alpha = (color, a) => {
    const hex = color.replace("#", "");
    const [r, g, b] = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return `rgba(${r},${g},${b},${a})`;
  };

  // The line of another run has the colour of the one before it, which it is compared with.
  const colorOf = (chart, i) => COLORS[(chart.series.slice(0, i + 1).filter((s) => !s.other).length - 1) % COLORS.length];

  const column = (name) => R.data.series.columns[name];

  // On a logarithmic axis only the powers of ten get a line.
  const powers = (u, splits) => splits.map((v) => (v > 0 && Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-9 ? v : null));

  const axis = (side, log) => ({
    scale: side === 1 ? "r" : side === 3 ? "y" : "x", side,
    stroke: R.css("--muted"), font: "11px " + R.css("--sans"), size: side === 2 ? 26 : 54, gap: 5,
    grid: { show: side !== 1, stroke: R.css("--grid"), width: 1, ...(log ? { filter: powers } : {}) }, ticks: { show: false },
    values: side === 2 ? undefined : (u, splits) => splits.map((v) => (v === null ? "" : R.num(v))),
    space: side === 2 ? 60 : 34, ...(side === 2 ? { incrs: WHOLE } : {}),
  });

  const marks = (u) => {
    const ctx = u.ctx;
    ctx.save();
    ctx.setLineDash([3, 4]);
    ctx.lineWidth = 1;
    for (const mark of R.data.marks) {
      ctx.strokeStyle = R.css(mark.kind === "resumed" ? "--muted" : "--bad");
      if (mark.step === null || mark.step < u.scales.x.min || mark.step > u.scales.x.max) continue;
      const x = Math.round(u.valToPos(mark.step, "x", true)) + 0.5;
      ctx.beginPath(); ctx.moveTo(x, u.bbox.top); ctx.lineTo(x, u.bbox.top + u.bbox.height); ctx.stroke();
    }
    ctx.restore();
  };

  // Plot columns for a chart: [x, ...]. `of[i]` tells which of the chart's series a plotted one belongs to.
  const plain = (chart) => {
    const data = [R.data.series.steps], series = [{}], of = [-1];
    const few = R.data.series.steps.length <= 40;
    chart.series.forEach((s, i) => {
      const color = R.css(colorOf(chart, i));
      const weight = s.sparse || s.raw ? 0 : smoothing;
      const scale = s.right ? "r" : "y";
      if (weight) {
        data.push(column(s.name));
        series.push({ scale, stroke: alpha(color, 0.22), width: 1, points: { show: false } });
        of.push(-1);
      }
      data.push(smooth(column(s.name), weight));
      series.push({
        scale, stroke: color, width: s.other ? 1 : s.sparse ? 1.5 : 1.75, spanGaps: true, dash: s.other ? [2, 2] : s.right ? [5, 3] : undefined,
        points: { show: Boolean(s.sparse) || few, size: s.sparse ? 6 : 4, fill: color, stroke: color },
      });
      of.push(i);
    });
    return { data, series, of };
  };

  // Areas on top of each other; what the step took beyond its named parts is "other".
  const stacked = (chart) => {
    const steps = R.data.series.steps, total = column(chart.stack);
    const used = steps.map((_, k) => chart.series.reduce((sum, s) => sum + (column(s.name)[k] || 0), 0));
    const parts = chart.series.map((s) => column(s.name));
    if (total) parts.push(total.map((t, k) => (t === null ? null : Math.max(0, t - used[k]))));
    const data = [steps], series = [{}], bands = [], of = [-1];
    const sums = [];
    let below = steps.map(() => 0);
    parts.forEach((values) => {
      below = below.map((b, k) => b + (values[k] || 0));
      sums.push(below.map((b, k) => (used[k] || (total && total[k]) ? b : null)));
    });
    // Drawn from the top of the pile down, so that each area covers the ones behind it.
    for (let i = parts.length - 1; i >= 0; i--) {
      const color = i === chart.series.length ? R.css("--muted") : R.css(COLORS[chart.series[i].color % COLORS.length]);
      data.push(sums[i]);
      series.push({ scale: "y", stroke: color, width: 0.5, fill: alpha(color, 0.62), spanGaps: true, points: { show: false } });
      of.push(i);
      if (i > 0) bands.push({ series: [data.length - 1, data.length] });
    }
    return { data, series, bands, of, raw: parts };
  };

  const range = (chart, scale) => (u, low, high) => {
    if (low === null || low === undefined) return [0, 1];
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; return [low - (low === 0 ? 0 : pad), high + pad]; }
    const pad = (high - low) * 0.06;
    if (chart.stack || (chart.zero && scale === "y")) return [0, high + pad];
    const floor = low >= 0 && low - pad < 0 ? 0 : low - pad;
    return [low >= 0 && low < (high - low) * 0.4 ? 0 : floor, high + pad];
  };

  const useLog = (chart) => {
    if (!chart.log) return false;
    const values = chart.series.flatMap((s) => column(s.name)).filter((v) => v !== null);
    return values.length > 1 && values.every((v) => v > 0) && Math.max(...values) / Math.min(...values) > 20;
  };

  class Card {
    constructor(chart) {
      this.chart = chart;
      if (chart.stack) chart.series.forEach((s, i) => { s.color = i; });
      this.labels = chart.series.map((s) => s.label);
      if (chart.stack && column(chart.stack)) this.labels.push("other");
      this.plot = R.el("div", { class: "plot" });
      this.step = R.el("span", { class: "unit at-step" });
      this.readout = this.labels.map(() => R.el("b"));
      const legend = R.el("ul", { class: "legend" }, ...this.labels.map((label, i) =>
        R.el("li", { title: i < chart.series.length ? chart.series[i].name : "step time − the named parts" },
          R.el("i", { class: chart.series[i] && chart.series[i].right ? "key right" : "key", style: { background: `var(${this.colorName(i)})` } }),
          R.plain(label) + (chart.series[i] && chart.series[i].right ? " (right)" : ""), this.readout[i])));
      const wide = R.el("button", { type: "button", class: "quiet grow", "aria-label": "Enlarge " + chart.title, title: "Enlarge", onclick: () => {
        this.node.classList.toggle("whole"); this.fit();
      } }, "⤢");
      this.node = R.el("figure", { class: "card chart" + (chart.wide ? " wide" : ""), "data-chart": chart.id, tabindex: "0", "aria-label": this.describe() },
        R.el("figcaption", {}, R.el("span", { class: "chart-title" }, chart.title), chart.unit && R.el("span", { class: "unit" }, chart.unit), this.step, wide),
        this.plot, legend);
      this.node.addEventListener("keydown", (event) => this.key(event));
    }

    colorName(i) { return i === this.chart.series.length ? "--muted" : colorOf(this.chart, i); }

    describe() {
      const steps = R.data.series.steps;
      const said = this.chart.series.map((s) => {
        const values = column(s.name).filter((v) => v !== null);
        return `${s.label} from ${R.num(values[0])} to ${R.num(values[values.length - 1])}`;
      });
      return `${this.chart.title}, steps ${steps[0]} to ${steps[steps.length - 1]}: ${said.join("; ")}. Arrow keys read values.`;
    }

    key(event) {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (!move || event.target !== this.node) return;
      event.preventDefault();
      const last = R.data.series.steps.length - 1;
      const from = this.u.cursor.idx === null || this.u.cursor.idx === undefined ? last : this.u.cursor.idx;
      const to = Math.max(0, Math.min(last, from + move));
      this.u.setCursor({ left: this.u.valToPos(R.data.series.steps[to], "x"), top: 10 }, true, true);
    }

    draw() {
      if (this.u) this.u.destroy();
      const made = this.chart.stack ? stacked(this.chart) : plain(this.chart);
      const right = this.chart.series.some((s) => s.right), log = useLog(this.chart);
      this.made = made;
      this.u = new uPlot({
        width: Math.max(200, this.plot.clientWidth), height: this.height(),
        padding: [8, right ? 0 : 14, 0, 0], legend: { show: false },
        cursor: { sync: { key: SYNC.key, scales: ["x", null] }, y: false, points: { size: 7, width: 2 }, drag: { x: true, y: false, setScale: true } },
        scales: {
          x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
          y: log ? { distr: 3 } : { range: range(this.chart, "y") }, r: { range: range(this.chart, "r") },
        },
        axes: [axis(2), axis(3, log), ...(right ? [axis(1)] : [])],
        series: made.series, bands: made.bands,
        hooks: { draw: [marks], setCursor: [(u) => this.read(u.cursor.idx)], setScale: [(u, key) => { if (key === "x") R.zoomed(u); }] },
      }, made.data, this.plot);
      this.read(null);
    }

    // Logged values, not smoothed ones, under the crosshair; else the last ones.
    read(idx) {
      const free = idx === null || idx === undefined;
      // What is measured now and then keeps its last value until the next.
      const at = (values, sparse) => {
        if (!free && !sparse) return values[idx];
        for (let k = free ? values.length - 1 : idx; k >= 0; k--) if (values[k] !== null && values[k] !== undefined) return values[k];
        return null;
      };
      this.made.of.forEach((i) => {
        if (i < 0) return;
        const one = this.chart.series[i];
        this.readout[i].textContent = R.num(this.made.raw ? at(this.made.raw[i], false) : at(column(one.name), one.sparse));
      });
      this.step.textContent = free ? "" : "step " + R.data.series.steps[idx];
    }

    update(chart, zoomed) {
      Object.assign(this.chart, chart);
      if (chart.stack) chart.series.forEach((s, i) => { s.color = i; });
      this.made = chart.stack ? stacked(chart) : plain(chart);
      this.u.setData(this.made.data, !zoomed);
      this.node.setAttribute("aria-label", this.describe());
      this.read(this.u.cursor.idx);
    }

    height() { return this.node.classList.contains("whole") ? 380 : 210; }

    fit() { if (this.u) this.u.setSize({ width: Math.max(200, this.plot.clientWidth), height: this.height() }); }
  }

  let zooming = false;
  R.zoomed = (u) => {
    const steps = R.data.series.steps;
    const all = u.scales.x.min <= steps[0] && u.scales.x.max >= steps[steps.length - 1];
    R.byId("zoom-out").hidden = all;
    if (zooming || u.status === 0) return;
    zooming = true;
    cards.forEach((card) => { if (card.u && card.u !== u) card.u.setScale("x", { min: u.scales.x.min, max: u.scales.x.max }); });
    zooming = false;
  };

  const add = (chart) => {
    const card = new Card(chart);
    (chart.flat ? R.byId("flat-charts").lastElementChild : R.byId("charts")).append(card.node);
    cards.push(card);
    card.draw();
    return card;
  };

  const redraw = () => { zooming = true; cards.forEach((card) => card.draw()); zooming = false; R.byId("zoom-out").hidden = true; };
  R.redrawCharts = redraw;

  const defaultSmoothing = (count) => (count < 20 ? 0 : count < 80 ? 0.5 : 0.8);

  const setUpExplorer = () => {
    const names = Object.keys(R.data.series.columns);
    R.byId("explore").hidden = false;
    R.byId("metric-names").append(...names.map((name) => R.el("option", { value: name })));
    const input = R.byId("explore-name"), hint = R.byId("explore-hint");
    const go = () => {
      const name = input.value.trim();
      if (!names.includes(name)) { hint.textContent = name ? "This run has no metric of that name." : "Type or pick a name first."; return; }
      own.push({ id: "own-" + name, title: name, series: [{ name, label: name.split("/").pop(), sparse: /^val/.test(name) }] });
      add(own[own.length - 1]).node.focus();
      input.value = ""; hint.textContent = "";
    };
    R.byId("explore-add").addEventListener("click", go);
    input.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); go(); } });
  };

  const drawAll = () => {
    const flat = R.data.charts.filter((chart) => chart.flat).length, fold = R.byId("flat-charts");
    R.replace(R.byId("charts"));
    R.replace(fold.lastElementChild);
    fold.hidden = !flat;
    fold.firstElementChild.textContent = flat === 1 ? "1 chart without any change" : `${flat} charts without any change`;
    cards = [];
    zooming = true;
    [...R.data.charts, ...own].forEach(add);
    zooming = false;
    R.byId("zoom-out").hidden = true;
  };

  const shape = (charts) => JSON.stringify(charts.map((chart) => [chart.id, chart.flat, chart.series.map((s) => s.name)]));
  let drawn = "";

  R.updateCharts = () => {
    if (!cards.length) { R.setUpCharts(); return; }
    if (shape(R.data.charts) !== drawn) { drawn = shape(R.data.charts); drawAll(); return; }
    const zoomed = !R.byId("zoom-out").hidden;
    zooming = true;
    cards.forEach((card, i) => card.update(R.data.charts[i] || own[i - R.data.charts.length], zoomed));
    zooming = false;
  };

  R.setUpCharts = () => {
    const list = R.data.charts, box = R.byId("charts"), slider = R.byId("smooth"), out = R.byId("smooth-out");
    R.byId("curve-tools").hidden = !list.length;
    if (!list.length) {
      R.replace(box, R.empty("No step is finished yet", "Curves appear here with the first record in metrics.jsonl."));
      return;
    }
    drawn = shape(list);
    smoothing = R.state.smooth === undefined ? defaultSmoothing(R.data.series.steps.length) : R.state.smooth;
    const show = () => { slider.value = smoothing; out.textContent = smoothing ? Number(smoothing).toFixed(2) : "off"; };
    show();
    slider.addEventListener("input", () => { smoothing = Number(slider.value); show(); R.save({ smooth: smoothing }); redraw(); });
    drawAll();
    R.byId("flat-charts").addEventListener("toggle", () => cards.forEach((card) => card.fit()));
    R.byId("zoom-out").addEventListener("click", redraw);
    setUpExplorer();
    new ResizeObserver(() => cards.forEach((card) => card.fit())).observe(box);
  };
})();
