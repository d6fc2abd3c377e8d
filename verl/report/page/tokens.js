// One response, token by token, in a panel: coloured by log-prob, by sampler − trainer, or by advantage.
"use strict";
(() => {
  const A = R.data.responses;
  const LOW = -6; // log-prob at which the colour is full
  let mode = R.state.mode || "lp", current = null, cursor = -1, spans = [], opener = null;

  const lp = (row, k) => (row.l && row.l[k] !== null ? row.l[k] * 1e-4 : null);
  const mu = (row, k) => (row.r && row.r[k] !== null ? row.r[k] * 1e-4 : null);
  const diff = (row, k) => (row.q && row.q[k] !== null ? row.q[k] * 1e-6 : null);
  const adv = (row, k) => (Array.isArray(row.w) ? row.w[k] : row.w === undefined ? null : row.w);
  const policy = (row, k) => !row.m || row.m[k] === 1;

  const largest = (row, value) => row.t.reduce((most, _, k) => Math.max(most, policy(row, k) ? Math.abs(value(row, k) || 0) : 0), 0);

  const MODES = {
    lp: { label: "log-prob", of: (row, k) => { const v = lp(row, k); return v === null ? mu(row, k) : v; }, has: (row) => row.l || row.r, span: () => -LOW,
      legend: () => ["0 (certain)", `≤ −${-LOW}`, "ramp-one"] },
    diff: { label: "sampler − trainer", of: diff, has: (row) => row.q, span: (row) => largest(row, diff),
      legend: (row) => { const m = R.num(largest(row, diff)); return ["−" + m, "+" + m, "ramp-two"]; } },
    adv: { label: "advantage", of: adv, has: (row) => row.w !== undefined, span: (row) => Math.max(1, largest(row, adv)),
      legend: (row) => { const m = R.num(Math.max(1, largest(row, adv))); return ["−" + m, "+" + m, "ramp-two"]; } },
    plain: { label: "plain", of: () => null, has: () => true, span: () => 1, legend: () => null },
  };

  const paint = () => {
    const row = current, how = MODES[mode], full = how.span(row) || 1;
    spans.forEach((span, k) => {
      const v = policy(row, k) ? how.of(row, k) : null;
      const share = v === null ? 0 : Math.min(1, Math.abs(v) / full);
      const color = mode === "lp" || v < 0 ? "var(--cold)" : "var(--warm)";
      span.style.backgroundColor = share < 0.004 ? "" : `color-mix(in srgb, ${mode === "lp" ? "var(--warm)" : color} ${Math.round(share * 72)}%, transparent)`;
    });
    const legend = how.legend(row);
    R.replace(R.byId("token-legend"), ...(legend ? [R.el("span", {}, legend[0]), R.el("i", { class: legend[2] }), R.el("span", {}, legend[1])] : []));
  };

  const inspect = (k) => {
    if (cursor >= 0 && spans[cursor]) spans[cursor].classList.remove("at");
    cursor = k;
    const box = R.byId("inspector");
    if (k < 0) { R.replace(box, R.el("span", { class: "muted" }, "Point at a token, or use the arrow keys, to read its values.")); return; }
    const row = current;
    spans[k].classList.add("at");
    const fact = (label, value) => R.el("span", {}, R.el("small", {}, label), R.el("b", {}, value));
    const p = lp(row, k) === null ? mu(row, k) : lp(row, k);
    const sci = (x) => (x === null ? "–" : (x > 0 ? "+" : "") + R.num(x));
    R.replace(box,
      R.el("code", {}, ...R.shown(JSON.stringify(A.tokens[row.t[k]]).slice(1, -1))),
      fact("token", `${k + 1} of ${row.t.length}`),
      ...(policy(row, k) ? [
        fact("probability", p === null ? "–" : R.num(Math.exp(p))),
        fact("trainer", R.num(lp(row, k))), fact("sampler", R.num(mu(row, k))),
        fact("difference", sci(diff(row, k))), fact("advantage", R.signed(adv(row, k))),
      ] : [fact("written by", "tool or environment")]));
  };

  const tokenNode = (row, k) => {
    const text = A.tokens[row.t[k]];
    const span = R.el("span", { class: policy(row, k) ? "tok" : "tok other", "data-k": String(k) });
    if (/^<\|.*\|>$/.test(text)) span.classList.add("special");
    text.split("\n").forEach((part, i) => {
      if (i) span.append(R.el("span", { class: "nl", "aria-hidden": "true" }, "↵"), "\n");
      span.append(...R.shown(part));
    });
    return span;
  };

  const stream = (row) => {
    spans = row.t.map((_, k) => tokenNode(row, k));
    const box = R.el("div", { class: "tokens", id: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens of the response; arrow keys move" }, ...spans);
    box.addEventListener("mouseover", (event) => {
      const span = event.target.closest(".tok");
      if (span) inspect(Number(span.dataset.k));
    });
    box.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -1e9, End: 1e9 }[event.key];
      if (!move) return;
      event.preventDefault();
      event.stopPropagation();
      inspect(Math.max(0, Math.min(spans.length - 1, cursor + move)));
      spans[cursor].scrollIntoView({ block: "nearest" });
    });
    return box;
  };

  const siblings = (row) => A.rows.map((r, at) => [r, at]).filter(([r]) => r.u === row.u && r.s === row.s);

  const head = (row, at) => {
    const order = R.visibleResponses, place = order.indexOf(at);
    const go = (by) => () => R.openResponse(order[place + by]);
    const button = (label, text, by) => R.el("button", { type: "button", class: "quiet", "aria-label": label, title: label, disabled: !(place >= 0 && order[place + by] !== undefined), onclick: go(by) }, text);
    return R.el("header", { class: "panel-head" },
      R.el("h2", { id: "panel-title" }, `Step ${row.s}, response ${row.i + 1}`),
      R.el("span", { class: "muted uid" }, ...R.shown(row.u)),
      R.el("span", { class: "grow-space" }),
      button("Previous response", "←", -1), button("Next response", "→", 1),
      R.el("button", { type: "button", class: "quiet", "aria-label": "Close", title: "Close (Esc)", onclick: () => R.byId("panel").close() }, "✕"));
  };

  const figures = (row) => {
    const fact = (label, node) => R.el("div", {}, R.el("dt", {}, label), R.el("dd", {}, node));
    const rows = [fact("score", R.scoreCell(row)), fact("advantage", R.signed(row.a)), fact("tokens", R.num(row.n)), fact("end", R.plain(row.f || "–"))];
    if (row.v && row.v.length) rows.push(fact("weight version", row.v.join(", ")));
    if (row.d) rows.push(fact("source", R.plain(row.d)));
    for (const [key, value] of Object.entries(row.x || {})) rows.push(fact(R.plain(key), typeof value === "number" ? R.num(value) : R.plain(String(value))));
    return R.el("dl", { class: "facts tight" }, ...rows);
  };

  const group = (row, at) => {
    const all = siblings(row);
    if (all.length < 2) return null;
    return R.el("nav", { class: "chips", "aria-label": "Responses to the same prompt" }, R.el("span", { class: "muted" }, "Same prompt"),
      ...all.map(([r, k]) => R.el("button", { type: "button", class: "chip", "aria-current": k === at ? "true" : null, onclick: () => R.openResponse(k) },
        `${r.i + 1}`, R.el("small", {}, r.e ? "failed" : R.num(r.sc)))));
  };

  const block = (title, text) => R.el("section", { class: "block" }, R.el("h3", {}, title), R.el("div", { class: "prose" }, ...R.shown(text)));

  // Turn by turn: who said what, tool calls and their results folded, seconds and step rewards of the policy's turns.
  const folded = (title, text) => R.el("details", {}, R.el("summary", {}, ...R.shown(title)), R.el("pre", {}, ...R.shown(text)));
  const dialogue = (row) => {
    const turns = row.dl.filter((m) => m.v);
    const waited = (m) => { const next = turns[turns.indexOf(m) + 1]; return next ? next.v[0] - m.v[0] - m.v[1] : null; };
    const figures = (m) => {
      if (!m.v) return [];
      const [, took, reward] = m.v, after = waited(m);
      return [took !== null && R.duration(took), after !== null && `then ${R.duration(after)}`, reward !== null && R.el("strong", { class: reward < 0 ? "minus" : "plus" }, `reward ${R.signed(reward)}`)];
    };
    const said = (m) => (m.r === "tool" ? folded(`result of ${m.n || "a tool"}`, m.c) : m.c.trim() ? R.el("div", {}, ...R.shown(m.c)) : "");
    const turn = (m) => R.el("li", { class: m.v ? "said own" : "said" },
      R.el("header", {}, R.el("strong", {}, R.plain(m.r)), ...figures(m).map((f) => f && R.el("span", {}, f))),
      said(m), ...R.images(m, "image that was shown"), ...m.k.map(([name, args]) => folded(`calls ${name}`, args)));
    return R.el("section", { class: "block" }, R.el("h3", {}, "Dialogue"), R.el("ol", { class: "dialogue" }, ...row.dl.map(turn)));
  };

  // Segments as a tree: each is a bar over the tokens of its own, which begins where it left its parent.
  const tree = (row) => {
    const most = Math.max(...row.sg.map(([, , size]) => size)), share = (n) => `${(100 * n) / most}%`;
    const line = ([parent, shared, size, wrote], at) => {
      const from = parent === null ? "" : `, ${R.num(shared)} of them with ${parent + 1}`;
      return R.el("li", {}, R.el("span", { class: "branch", style: { marginLeft: share(shared), width: share(size - shared) } }),
        R.el("small", {}, `${at + 1}: ${R.num(size)} tokens${from}; ${R.num(wrote)} sampled`));
    };
    return R.el("section", { class: "block" }, R.el("h3", {}, "Segments"), R.el("ol", { class: "tree" }, ...row.sg.map(line)));
  };

  const tokenSection = (row) => {
    if (!row.t) return block("Response", R.output(row) || "(empty)");
    const options = Object.entries(MODES).filter(([, m]) => m.has(row)).map(([key, m]) => [key, m.label]);
    if (!options.some(([key]) => key === mode)) mode = options[0][0];
    return R.el("section", { class: "block" },
      R.el("div", { class: "token-head" }, R.el("h3", {}, "Response"),
        R.segments("Colour by", options, mode, (key) => { mode = key; R.save({ mode }); paint(); mark(); }),
        R.el("div", { class: "legend-ramp", id: "token-legend" })),
      stream(row), row.m ? R.el("p", { class: "hint" }, "Underlined: not written by the model.") : null);
  };

  // The address names the open response, so that it can be linked to and survives a reload.
  const mark = () => {
    if (current) window.history.replaceState(null, "", R.responseLink(current, mode));
    else window.history.replaceState(null, "", window.location.pathname + window.location.search);
  };

  R.openResponse = (at) => {
    const row = A.rows[at], panel = R.byId("panel");
    if (!row) return;
    current = row;
    cursor = -1;
    if (!panel.open) opener = document.activeElement;
    R.replace(panel, head(row, at), R.el("div", { class: "panel-body" }, figures(row), group(row, at) || "",
      row.e ? R.el("p", { class: "warning" }, "Scoring failed: ", ...R.shown(row.e)) : "",
      row.dl ? dialogue(row) : block("Prompt", R.prompt(row)),
      row.im ? R.el("p", { class: "images" }, ...R.images(row), R.el("span", { class: "muted" }, `${row.it.join(" + ")} image tokens`)) : "",
      row.sg ? tree(row) : "", tokenSection(row), row.g ? block("Reference", row.g) : ""),
      row.t ? R.el("footer", { class: "inspector", id: "inspector", role: "status" }) : "");
    if (row.t) { paint(); inspect(-1); }
    if (!panel.open) panel.showModal();
    panel.querySelector(".panel-body").scrollTop = 0;
    const focus = R.byId("tokens") || panel.querySelector("button");
    focus.focus({ preventScroll: true });
    mark();
  };

  R.setUpPanel = () => {
    const panel = R.byId("panel");
    panel.addEventListener("close", () => { current = null; mark(); if (opener && opener.isConnected) opener.focus(); });
    panel.addEventListener("click", (event) => { if (event.target === panel) panel.close(); });
    panel.addEventListener("keydown", (event) => {
      const by = { j: 1, k: -1 }[event.key];
      if (by && current) R.openResponse(R.visibleResponses[R.visibleResponses.indexOf(A.rows.indexOf(current)) + by]);
    });
    const open = () => {
      const parts = window.location.hash.match(/^#a=(\d+)\/([^/]*)\/(\d+)(?:\/(\w+))?$/);
      if (!parts) return;
      let uid;
      try { uid = decodeURIComponent(parts[2]); } catch (malformed) { return; }
      if (parts[4] && parts[4] in MODES) mode = parts[4];
      R.openResponse(A.rows.findIndex((r) => r.s === Number(parts[1]) && R.plain(r.u) === uid && r.i === Number(parts[3])));
    };
    window.addEventListener("hashchange", open);
    open();
  };
})();
