// The top of the page, the theme, the live reload, and the start of all parts.
"use strict";
(() => {
  const D = R.data;

  const spark = (name) => {
    const values = (D.series.columns[name] || []).filter((v) => v !== null);
    if (values.length < 3) return null;
    const every = Math.max(1, Math.floor(values.length / 80));
    const kept = values.filter((_, k) => k % every === 0 || k === values.length - 1);
    const low = Math.min(...kept), high = Math.max(...kept), span = high - low || 1;
    const points = kept.map((v, k) => `${((k / (kept.length - 1)) * 118 + 1).toFixed(1)},${(25 - ((v - low) / span) * 22).toFixed(1)}`);
    const svg = R.svg("svg", { class: "spark", viewBox: "0 0 120 28", preserveAspectRatio: "none", "aria-hidden": "true" });
    svg.append(R.svg("polyline", { points: points.join(" ") }));
    return svg;
  };

  const figure = (f) => {
    const change = f.to !== undefined;
    const good = change && (f.up ? f.to > f.from : f.to < f.from);
    const value = change
      ? R.el("p", { class: "figure" }, R.el("span", { class: "from" }, R.num(Number(f.from.toPrecision(3)))), R.el("span", { class: "arrow", "aria-label": "to" }, "→"), R.el("strong", {}, R.num(Number(f.to.toPrecision(3)))))
      : R.el("p", { class: "figure" }, R.el("strong", {}, f.unit === "s" ? R.duration(f.value) : R.num(f.value)), f.unit === "s" ? null : R.el("span", { class: "unit" }, f.unit));
    const delta = change && f.to !== f.from && R.el("span", { class: good ? "delta good" : "delta" }, (f.to >= f.from ? "+" : "−") + R.num(Math.abs(Number((f.to - f.from).toPrecision(3)))));
    return R.el("div", { class: "card figure-card", title: f.name }, R.el("p", { class: "label" }, f.label, delta), value, spark(f.name), R.el("p", { class: "hint" }, f.note));
  };

  // Generation and evaluation train nothing: they have one record, and no curves.
  const alone = D.lastStep === 0 && !D.totalSteps;
  if (alone) for (const id of ["curves", "curves-link"]) R.byId(id).hidden = true;

  const age = () => (D.times.last === null ? null : Date.now() / 1000 - D.times.last);
  const stepTime = () => { const f = D.headline.find((h) => h.unit === "s"); return f ? f.value : 60; };
  const quiet = () => D.status.state === "running" && age() !== null && age() > Math.max(600, 20 * stepTime());

  const status = () => {
    const state = quiet() ? "quiet" : D.status.state;
    const parts = [R.el("span", { class: "pill " + state }, state === "quiet" ? "no news" : R.plain(D.status.word))];
    const say = (text) => text && parts.push(R.el("span", {}, text));
    if (D.lastStep !== null && !alone) say(D.totalSteps ? `step ${D.lastStep.toLocaleString("en-US")} of ${D.totalSteps.toLocaleString("en-US")}` : `step ${D.lastStep}`);
    if (D.elapsed) say(`${R.duration(D.elapsed)} of work`);
    if (state === "running" && D.totalSteps && D.lastStep) say(`about ${R.duration((D.totalSteps - D.lastStep) * stepTime())} left`);
    if (D.status.state === "running" && age() !== null) say(`last step ${R.duration(Math.max(0, age()))} ago`);
    if (D.times.last !== null && D.status.state !== "running") say(R.when(D.times.last));
    if (D.status.why) parts.push(R.el("span", { class: "why" }, ...R.shown(D.status.why)));
    R.replace(R.byId("status"), ...parts);
    if (D.totalSteps && D.lastStep !== null) {
      const bar = R.byId("progress");
      bar.hidden = state === "finished";
      bar.firstElementChild.style.width = Math.min(100, (100 * D.lastStep) / D.totalSteps) + "%";
    }
  };

  const overview = () => {
    R.replace(R.byId("project"), ...R.shown(D.project));
    R.replace(R.byId("experiment"), ...R.shown(D.experiment));
    status();
    R.replace(R.byId("headline"), ...D.headline.map(figure));
    const fact = ([label, value]) => R.el("div", {}, R.el("dt", {}, label), R.el("dd", {}, ...R.shown(value)));
    const top = [D.model && ["Model", D.model], D.device && ["Device", D.device]].filter(Boolean);
    R.replace(R.byId("facts"), ...[...top, ...D.facts].map(fact));
    const torn = Object.entries(D.unreadable);
    R.byId("unreadable").hidden = !torn.length;
    if (torn.length) {
      R.byId("unreadable").textContent = "Could not be read and left out: " + torn.map(([file, count]) => `${count} ${count === 1 ? "line" : "lines"} of ${file}`).join(", ") + ".";
    }
    const every = D.series.every > 1 ? ` Each point of a curve stands for ${D.series.every} steps.` : "";
    R.byId("foot").textContent = `Written by verl ${R.when(D.built)} from ${R.plain(D.folder)}.${every} Charts drawn with uPlot (MIT).`;
  };

  const theme = () => {
    const order = ["auto", "light", "dark"], button = R.byId("theme");
    const apply = () => {
      const now = order.includes(R.state.theme) ? R.state.theme : "auto";
      if (now === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = now;
      button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[now];
    };
    apply();
    button.addEventListener("click", () => {
      R.save({ theme: order[(order.indexOf(R.state.theme || "auto") + 1) % 3] });
      apply();
      R.redrawCharts();
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => R.redrawCharts());
  };

  // The page of a server asks for what is new, and keeps what the reader has opened, chosen and zoomed.
  const follow = () => {
    let held = null;
    const take = (responses) => { Object.assign(D.responses, responses); R.drawResponses(); };
    const update = (fresh) => {
      const { responses, ...rest } = fresh;
      Object.assign(D, rest);
      overview();
      if (!alone) R.updateCharts();
      R.drawWork();
      R.drawEvents();
      if (responses && R.byId("panel").open) held = responses; // its rows are counted by their places
      else if (responses) take(responses);
    };
    R.byId("panel").addEventListener("close", () => { if (held) { take(held); held = null; } });
    const ask = async () => {
      try {
        const answer = await fetch(`data?tag=${D.tag}&responses=${encodeURIComponent(D.responsesTag)}`);
        R.byId("lost").hidden = answer.ok;
        if (answer.status === 200) update(await answer.json());
      } catch (gone) {
        if (!(gone instanceof TypeError)) throw gone;
        R.byId("lost").hidden = false;
      } finally {
        window.setTimeout(ask, 1000 * D.poll);
      }
    };
    window.setTimeout(ask, 1000 * D.poll);
    window.setInterval(status, 5000);
  };

  const live = () => {
    if (D.status.state !== "running" && D.status.state !== "waiting") return;
    const box = R.byId("live");
    R.byId("live-box").hidden = false;
    box.checked = Boolean(R.state.live);
    if (R.state.live && R.state.scroll) window.scrollTo(0, R.state.scroll);
    box.addEventListener("change", () => R.save({ live: box.checked }));
    // Not under someone's hands: while a field has the focus or a text is selected, wait.
    const busy = () => /^(INPUT|SELECT)$/.test(document.activeElement.tagName) && document.activeElement !== box;
    window.setInterval(() => {
      if (!box.checked || document.hidden || busy() || String(window.getSelection())) return;
      R.save({ scroll: window.scrollY });
      window.location.reload();
    }, 20000);
    window.setInterval(status, 5000);
  };

  theme();
  overview();
  R.setUpScores();
  if (!alone) R.setUpCharts();
  R.drawWork();
  R.drawResponses();
  R.drawEvents();
  R.setUpConfig();
  R.setUpPanel();
  if (D.live) follow(); else live();
  document.documentElement.dataset.ready = "1";
})();
