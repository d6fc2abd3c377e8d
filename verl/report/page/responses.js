// The table of sampled responses: step, filters, sorting; a row opens the token view.
"use strict";
(() => {
  const A = R.data.responses;
  const PAGE = 24;
  const prompt = (row) => A.prompts[row.p];
  R.output = (row) => {
    if (row.o === undefined) row.o = row.t.slice(0, row.t.length - (row.z || 0)).map((i) => A.tokens[i]).join("");
    return row.o;
  };
  R.prompt = prompt;

  R.images = (row, alt = "image of the prompt") => (row.im || []).map((at, k) => R.el("img", { class: "seen", src: A.images[at], alt, title: row.it && row.it[k] ? `${row.it[k]} tokens` : null }));
  R.responseLink = (row, mode) => `#a=${row.s}/${encodeURIComponent(R.plain(row.u))}/${row.i}/${mode}`;

  const view = Object.assign({ step: "newest", text: "", source: "", finish: "", low: "", high: "", sort: "", down: false }, R.state.responses);
  let limit = PAGE;
  R.visibleResponses = [];

  const COLUMNS = [
    ["s", "Step", (r) => r.s], ["p", "Prompt", (r) => prompt(r)], ["o", "Response", (r) => R.output(r)],
    ["sc", "Score", (r) => r.sc], ["x", "Parts", null], ["a", "Advantage", (r) => r.a], ["n", "Tokens", (r) => r.n], ["f", "End", (r) => r.f],
  ];

  const chosenStep = () => (view.step === "newest" ? A.steps[A.steps.length - 1] : view.step === "all" ? null : Number(view.step));

  const matches = (row) => {
    const step = chosenStep();
    if (step !== null && row.s !== step) return false;
    if (view.source && (row.d || "") !== view.source) return false;
    if (view.finish && row.f !== view.finish) return false;
    if (view.low !== "" && !(row.sc !== null && row.sc >= Number(view.low))) return false;
    if (view.high !== "" && !(row.sc !== null && row.sc <= Number(view.high))) return false;
    if (!view.text) return true;
    const needle = view.text.toLowerCase();
    return prompt(row).toLowerCase().includes(needle) || R.output(row).toLowerCase().includes(needle) || row.g.toLowerCase().includes(needle);
  };

  const sorted = (rows) => {
    const found = COLUMNS.find(([key]) => key === view.sort);
    if (!found || !found[2]) return rows;
    const value = found[2], sign = view.down ? -1 : 1;
    return [...rows].sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === null || y === null) return (x === null) - (y === null);
      return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
    });
  };

  R.scoreCell = (row) => {
    if (row.e) return R.el("span", { class: "score failed", title: R.plain(row.e) }, "failed");
    if (row.sc === null) return R.el("span", { class: "muted" }, "–");
    const level = Math.max(0, Math.min(1, row.sc));
    return R.el("span", { class: "score" }, R.el("i", { style: { width: Math.round(level * 28) + "px" } }), R.num(row.sc));
  };

  R.partsText = (row) => Object.entries(row.x || {})
    .filter(([k, v]) => k !== "score" && !(k === "acc" && v === row.sc))
    .map(([k, v]) => `${R.plain(k)} ${typeof v === "number" ? R.num(v) : R.plain(String(v))}`);

  R.signed = (x) => (x === null || x === undefined ? "–" : (x > 0 ? "+" : "") + R.num(Math.abs(x) < 1e-9 ? 0 : Number(x.toFixed(3))));

  // Runs of blank lines only take room in a preview.
  const squeeze = (text) => text.trim().replace(/\n\s*\n/g, "\n");

  const clip = (text, count) => (text.length > count ? text.slice(0, count) + "…" : text);

  const rowNode = (row, previous) => {
    const again = !view.sort && previous && previous.u === row.u && previous.s === row.s;
    const open = () => R.openResponse(A.rows.indexOf(row));
    const response = R.el("a", { class: "open", href: R.responseLink(row, "lp"), onclick: (e) => { e.preventDefault(); e.stopPropagation(); open(); } }, ...R.shown(clip(squeeze(R.output(row)), 260) || "(empty)"));
    const parts = R.partsText(row);
    return R.el("tr", { class: again ? "again" : "first", onclick: open },
      R.el("td", { class: "num c-step" }, `${row.s}`),
      R.el("td", { class: "text c-prompt" }, ...(again ? [R.el("span", { class: "muted ditto" }, "same prompt")] : [...R.images(row), R.el("div", { class: "clamp" }, ...R.shown(clip(squeeze(prompt(row)), 300)))])),
      R.el("td", { class: "text c-response" }, R.el("div", { class: "clamp" }, response)),
      R.el("td", { class: "num c-score", "data-label": "score" }, R.scoreCell(row)),
      R.el("td", { class: "parts c-parts" }, ...parts.slice(0, 4).map((p) => R.el("span", {}, clip(p, 28)))),
      R.el("td", { class: "num c-adv " + (row.a > 1e-9 ? "plus" : row.a < -1e-9 ? "minus" : ""), "data-label": "advantage" }, R.signed(row.a)),
      R.el("td", { class: "num c-len", "data-label": "tokens" }, R.num(row.n)),
      R.el("td", { class: "c-end", "data-label": "end" }, R.el("span", { class: row.f === "length" ? "tag warn" : "tag" }, R.plain(row.f || "–"))));
  };

  const heading = ([key, label, value]) => {
    const pressed = view.sort === key;
    const th = R.el("th", { scope: "col", class: "c-" + { s: "step", p: "prompt", o: "response", sc: "score", x: "parts", a: "adv", n: "len", f: "end" }[key],
      "aria-sort": pressed ? (view.down ? "descending" : "ascending") : null });
    if (!value) { th.append(label); return th; }
    th.append(R.el("button", { type: "button", "data-sort": key, onclick: () => {
      if (view.sort !== key) Object.assign(view, { sort: key, down: !["p", "o", "f"].includes(key) });
      else if (view.down !== ["p", "o", "f"].includes(key)) view.down = !view.down;
      else view.sort = "";
      render();
      document.querySelector(`[data-sort="${key}"]`).focus();
    } }, label, R.el("span", { "aria-hidden": "true" }, pressed ? (view.down ? " ↓" : " ↑") : "")));
    return th;
  };

  const note = (rows) => {
    const scores = rows.map((r) => r.sc).filter((s) => s !== null);
    const mean = scores.length ? `, mean score ${R.num(scores.reduce((a, b) => a + b, 0) / scores.length)}` : "";
    const kept = A.stepsOnDisk > A.steps.length ? ` · ${A.steps.length} of ${A.stepsOnDisk} steps are in this page` : "";
    R.byId("responses-note").textContent = `${rows.length} ${rows.length === 1 ? "response" : "responses"} of this page${mean}${kept}`;
  };

  const render = () => {
    R.save({ responses: view });
    const rows = sorted(A.rows.filter(matches));
    R.visibleResponses = rows.map((row) => A.rows.indexOf(row));
    note(rows);
    if (!rows.length) {
      R.replace(R.byId("responses-body"), R.empty("No response matches", "Widen the filters, or pick another step."));
      return;
    }
    const body = R.el("tbody");
    rows.slice(0, limit).forEach((row, k) => body.append(rowNode(row, rows[k - 1])));
    const table = R.el("table", { class: "responses" }, R.el("thead", {}, R.el("tr", {}, ...COLUMNS.map(heading))), body);
    const more = rows.length > limit && R.el("button", { type: "button", class: "more", onclick: () => { limit += 4 * PAGE; render(); } }, `Show more (${rows.length - limit} left)`);
    R.replace(R.byId("responses-body"), R.el("div", { class: "table-box" }, table), more || "");
  };

  const field = (label, node) => R.el("label", {}, R.el("span", {}, label), node);

  const select = (key, options) => {
    const node = R.el("select", { "data-filter": key, onchange: () => { view[key] = node.value; limit = PAGE; render(); } },
      ...options.map(([value, text]) => R.el("option", { value }, R.plain(text))));
    if (!options.some(([value]) => value === String(view[key]))) view[key] = options[0][0];
    node.value = view[key];
    return node;
  };

  const input = (key, props) => {
    const node = R.el("input", { "data-filter": key, ...props, oninput: () => { view[key] = node.value; limit = PAGE; render(); } });
    node.value = view[key];
    return node;
  };

  const distinct = (key) => [...new Set(A.rows.map((row) => row[key] || ""))].sort();

  R.drawResponses = () => {
    if (!A.rows.length) {
      R.replace(R.byId("responses-body"), R.empty("No responses yet", "A few whole groups of each step are kept in trajectories/ as the run goes."));
      return;
    }
    const form = R.byId("filters");
    if (form.contains(document.activeElement)) { render(); return; } // not under someone's hands
    form.hidden = false;
    form.onsubmit = (event) => event.preventDefault();
    R.replace(form);
    const sources = distinct("d"), ends = distinct("f");
    const steps = [...A.steps].reverse();
    form.append(
      field("Step", select("step", [["newest", `newest (${steps[0]})`], ["all", "all in this page"], ...steps.map((s) => [String(s), String(s)])])),
      field("Text", input("text", { type: "search", placeholder: "in prompt, response or reference", spellcheck: "false" })),
      field("Score from", input("low", { type: "number", step: "any", class: "short" })),
      field("to", input("high", { type: "number", step: "any", class: "short" })));
    if (sources.length > 1) form.append(field("Source", select("source", [["", "any"], ...sources.map((s) => [s, s || "(none)"])])));
    if (ends.length > 1) form.append(field("End", select("finish", [["", "any"], ...ends.map((s) => [s, s || "(none)"])])));
    render();
  };
})();
