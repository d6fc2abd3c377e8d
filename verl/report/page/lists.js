// Events and config: two lists with a search box each.
"use strict";
(() => {
  const LEVELS = { error: "bad", critical: "bad", warning: "warn", warn: "warn" };
  const levelOf = (event) => LEVELS[event.level.toLowerCase()] || (/refus|error|fail|crash|timeout|died|silent|lost|watchdog|does_not_follow|^check_|no_signal|rejected_in/.test(event.kind) ? "warn" : "");

  // What an event says beyond its message: on one line if it is short and all there is, else folded away.
  const extras = (event) => {
    const rest = Object.entries(event.rest);
    if (!rest.length) return [];
    if (!event.message && rest.every(([, v]) => v.length < 120 && !v.includes("\n"))) {
      return rest.flatMap(([k, v], i) => [i ? " · " : "", R.el("span", { class: "muted" }, R.plain(k) + " "), ...R.shown(v)]);
    }
    const list = R.el("dl", {}, ...rest.flatMap(([k, v]) => [R.el("dt", {}, R.plain(k)), R.el("dd", {}, ...R.shown(v))]));
    return [R.el("details", {}, R.el("summary", {}, "details"), list)];
  };

  const eventNode = ({ event, times }) => R.el("li", { class: levelOf(event) },
    R.el("span", { class: "event-when", title: R.when(event.time) }, event.step !== null ? `step ${event.step}` : R.clock(event.time)),
    R.el("span", { class: "event-kind" }, R.plain(event.kind.replace(/_/g, " "))),
    R.el("div", { class: "event-text" }, ...R.shown(event.message), times > 1 ? R.el("span", { class: "tag" }, `× ${times}`) : null, ...extras(event)));

  // Neighbours that say the same are one entry with a count.
  const folded = (events) => {
    const out = [];
    for (const event of events) {
      const last = out[out.length - 1];
      if (last && event.message && last.event.kind === event.kind && last.event.message === event.message) { last.times += 1; continue; }
      out.push({ event, times: 1 });
    }
    return out;
  };

  // The newest event of each kind that somebody has to look at.
  const alarms = () => {
    const newest = new Map();
    for (const e of R.data.events.filter((e) => levelOf(e))) {
      newest.set(e.kind, { ...e, message: e.message || newest.get(e.kind)?.message || "" }); // said once, counted often
    }
    const text = (e) => `${e.step === null ? "" : `step ${e.step}: `}${e.kind.replace(/_/g, " ")}${e.message ? ", " + e.message.split("\n")[0] : ""}`;
    R.byId("alarms").hidden = !newest.size;
    R.replace(R.byId("alarms"), ...[...newest.values()].slice(-3).flatMap((e) => [R.el("a", { href: "#events" }, ...R.shown(text(e))), R.el("br")]));
  };

  let chosen = "", limit = 30;

  R.drawEvents = () => {
    alarms();
    const events = [...R.data.events].reverse(), body = R.byId("events-body");
    if (!events.length) { R.replace(body, R.empty("Nothing to report", "Notices, failed rewards, refused updates and saves are listed here.")); return; }
    const kinds = Object.entries(R.data.eventCounts);
    const pick = R.el("select", { "aria-label": "Kind of event", onchange: () => { chosen = pick.value; render(); } }, R.el("option", { value: "" }, `all kinds (${R.data.eventTotal})`),
      ...kinds.map(([kind, count]) => R.el("option", { value: kind }, `${R.plain(kind.replace(/_/g, " "))} (${count})`)));
    pick.value = chosen;
    const render = () => {
      const found = folded(events.filter((e) => !pick.value || e.kind === pick.value));
      const more = found.length > limit && R.el("button", { type: "button", class: "more", onclick: () => { limit += 200; render(); } }, `Show more (${found.length - limit} left)`);
      R.replace(body, R.el("ol", { class: "events" }, ...found.slice(0, limit).map(eventNode)), more || "",
        R.data.eventTotal > events.length ? R.el("p", { class: "hint" }, `The newest ${events.length} of ${R.data.eventTotal}; all are in events.jsonl.`) : "");
    };
    if (!R.byId("event-tools").contains(document.activeElement)) R.replace(R.byId("event-tools"), pick);
    render();
  };

  const configGroups = (rows) => {
    const groups = new Map();
    for (const [key, value] of rows) {
      const group = key.split(".")[0];
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push([key, value]);
    }
    return groups;
  };

  const configTable = (rows, open) => [...configGroups(rows)].map(([group, entries]) =>
    R.el("details", { class: "config-group", open }, R.el("summary", {}, R.plain(group), R.el("span", { class: "muted" }, String(entries.length))),
      R.el("dl", { class: "config" }, ...entries.flatMap(([key, value]) => [
        R.el("dt", {}, R.plain(key)), R.el("dd", { class: value === "null" ? "muted" : "" }, ...R.shown(value || "''"))]))));

  const differences = () => {
    const rows = R.data.differences;
    if (!rows) return;
    const cell = (value) => R.el("td", {}, ...R.shown(value));
    const table = R.el("table", { class: "scores" }, R.el("thead", {}, R.el("tr", {}, ...["differs in", "this run", "other run"].map((t) => R.el("th", {}, t)))),
      R.el("tbody", {}, ...rows.map((row) => R.el("tr", { class: "first" }, ...row.map(cell)))));
    R.byId("config-body").before(R.el("div", { class: "table-box", id: "differences" }, rows.length ? table : R.empty("The same settings", "The two runs differ in no key and no version.")));
  };

  R.setUpConfig = () => {
    differences();
    const body = R.byId("config-body");
    if (!R.data.config.length && !R.data.versions.length) { body.append(R.empty("No config.yaml in this folder", "The resolved config is written when a run starts.")); return; }
    const search = R.el("input", { type: "search", placeholder: "search keys and values", "aria-label": "Search the config", spellcheck: "false", oninput: () => render() });
    const versions = R.data.versions.map(([key, value]) => ["versions." + key, value]);
    const render = () => {
      const needle = search.value.trim().toLowerCase();
      const rows = [...R.data.config, ...versions].filter(([k, v]) => !needle || k.toLowerCase().includes(needle) || v.toLowerCase().includes(needle));
      R.replace(body, ...(rows.length ? configTable(rows, Boolean(needle)) : [R.empty("No key matches", "Search looks at full key names and values.")]));
    };
    R.byId("config-tools").append(search);
    render();
  };
})();
