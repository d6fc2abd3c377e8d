// The table of an evaluation: a row for each data source, from the metrics eval/{source}/{name}. Other runs have none.
"use strict";
(() => {
  const columns = R.data.series.columns;
  const last = (name) => (columns[name] || []).findLast((v) => v !== null);

  const bySource = () => {
    const found = new Map();
    for (const name of Object.keys(columns)) {
      const parts = /^eval\/(.+)\/([^/]+)$/.exec(name);
      if (!parts) continue;
      if (!found.has(parts[1])) found.set(parts[1], new Map());
      found.get(parts[1]).set(parts[2], last(name));
    }
    return found;
  };

  const SHOWN = ["prompts", "responses", "errors", "score", "accuracy"];
  const LABELS = { errors: "not scored", score: "mean score", bleu: "BLEU", rouge1: "ROUGE-1", rouge2: "ROUGE-2", rougeL: "ROUGE-L" };
  const INTERVAL = ["accuracy_low", "accuracy_high"];
  const share = (x) => (x === undefined ? "–" : (100 * x).toFixed(1) + " %");
  const isShare = (name) => name === "accuracy" || /^(pass|maj)@/.test(name);
  const size = (name) => Number(name.split("@")[1]);

  const cell = (name, values) => {
    const label = LABELS[name] || name;
    const text = isShare(name) ? share(values.get(name)) : R.num(values.get(name));
    const interval = name === "accuracy" && R.el("span", { class: "hint" }, ` ${share(values.get("accuracy_low"))} to ${share(values.get("accuracy_high"))}`);
    return R.el("td", { class: "num", "data-label": label }, text, interval);
  };

  R.setUpScores = () => {
    const sources = bySource();
    if (!sources.size) return;
    const names = [...new Set([...sources.values()].flatMap((values) => [...values.keys()]))].filter((n) => !INTERVAL.includes(n));
    const known = SHOWN.filter((n) => names.includes(n)), of = (kind) => names.filter((n) => n.startsWith(kind)).sort((a, b) => size(a) - size(b));
    const order = [...known, ...of("pass@"), ...of("maj@"), ...names.filter((n) => !known.includes(n) && !n.includes("@"))];
    const head = R.el("tr", {}, R.el("th", {}, "data source"), ...order.map((n) => R.el("th", {}, LABELS[n] || n)));
    const rows = [...sources].map(([source, values]) => R.el("tr", { class: "first" }, R.el("td", {}, ...R.shown(source)), ...order.map((n) => cell(n, values))));
    R.byId("scores-body").append(R.el("table", { class: "scores" }, R.el("thead", {}, head), R.el("tbody", {}, ...rows)));
    for (const id of ["scores", "scores-link"]) R.byId(id).hidden = false;
  };
})();
