// The newest steps on one clock: when the sampler had requests, what the trainer did; and the plan beside the measured.
"use strict";
(() => {
  const PHASES = {
    gen: ["waits for responses", "--grid"], reward: ["waits for scores", "--line"], old_log_prob: ["old log-probs", "--c3"], ref: ["reference", "--c4"],
    teacher: ["teacher", "--c8"], values: ["values", "--c5"], adv: ["advantages", "--c7"], update_critic: ["update critic", "--c6"], update_actor: ["update actor", "--c1"],
    update_weights: ["weight sync", "--c2"], sync_proof: ["proof of the sampler", "--c5"], testing: ["validation", "--c7"], save_checkpoint: ["save", "--muted"],
  };
  const SAMPLES = ["samples", "--c3"];
  const WIDTH = 1200, HEIGHT = 22, LEFT = 74;

  const bar = (from, to, row, [label, color], x) => {
    const node = R.svg("rect", { x: x(from), y: row * (HEIGHT + 6) + 4, width: Math.max(0.6, x(to) - x(from)), height: HEIGHT });
    node.style.fill = `var(${color})`;
    const title = R.svg("title", {});
    title.textContent = `${label}: ${R.duration(to - from)}`;
    node.append(title);
    return node;
  };

  const text = (content, props) => { const node = R.svg("text", props); node.textContent = content; return node; };

  R.drawWork = () => {
    const steps = R.data.lanes, shown = steps.length > 0;
    for (const id of ["work", "work-link"]) R.byId(id).hidden = !shown && !R.data.planned.length;
    R.byId("work-body").hidden = !shown;
    planned();
    if (!shown) return;
    const begin = steps[0].begin, end = Math.max(...steps.map((s) => s.end)), span = end - begin || 1;
    const x = (t) => LEFT + ((Math.min(end, Math.max(begin, t)) - begin) / span) * (WIDTH - LEFT);
    const used = new Set();
    const svg = R.svg("svg", { class: "work", viewBox: `0 0 ${WIDTH} ${2 * (HEIGHT + 6) + 24}`, role: "img", "aria-label": `Steps ${steps[0].step} to ${steps[steps.length - 1].step}, ${R.duration(span)}` });
    svg.append(text("sampler", { x: 0, y: 20 }), text("trainer", { x: 0, y: 20 + HEIGHT + 6 }));
    for (const step of steps) {
      for (const [from, to] of step.sampler || []) if (to > begin) svg.append(bar(from, to, 0, SAMPLES, x));
      for (const [name, from, to] of step.trainer || []) {
        const phase = PHASES[name] || [name.replace(/_/g, " "), "--muted"];
        used.add(phase);
        svg.append(bar(from, to, 1, phase, x));
      }
      const edge = R.svg("line", { x1: x(step.begin), x2: x(step.begin), y1: 0, y2: 2 * (HEIGHT + 6) + 8 });
      svg.append(edge, text(String(step.step), { x: x(step.begin) + 3, y: 2 * (HEIGHT + 6) + 18 }));
    }
    const key = ([label, color]) => R.el("li", {}, R.el("i", { class: "key", style: { background: `var(${color})` } }), label);
    R.replace(R.byId("work-legend"), ...[SAMPLES, ...used].map(key));
    R.replace(R.byId("work-body"), svg);
  };

  const planned = () => {
    const box = R.byId("planned");
    box.hidden = !R.data.planned.length;
    const unit = (name) => (name === "memory" ? " GiB" : " s");
    const row = ([name, plan, seen]) => R.el("tr", { class: "first" }, R.el("td", {}, R.plain(name.replace(/_/g, " "))),
      ...[plan, seen].map((v) => R.el("td", { class: "num" }, R.num(v) + unit(name))), R.el("td", { class: "num" }, `${R.signed(Math.round(100 * (plan / seen - 1)))} %`));
    R.replace(box, R.el("table", { class: "scores" }, R.el("thead", {}, R.el("tr", {}, ...["part of a step", "planned", "measured", "difference"].map((t) => R.el("th", {}, t)))),
      R.el("tbody", {}, ...R.data.planned.map(row))));
  };
})();
