// Events and config: two lists with a search box each.
"use strict";
(() => {
  const LEVELS = { error: "bad", critical: "bad", warning: "warn", warn: "warn" };
  const levelOf = (event) => LEVELS[event.level.toLowerCase()] || (/refus|error|fail|crash|timeout|died|silent|lost/.test(event.kind) ? "warn" : "");

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

  R.setUpEvents = () => {
    const events = [...R.data.events].reverse(), body = R.byId("events-body");
    if (!events.length) { body.append(R.empty("Nothing to report", "Notices, failed rewards, refused updates and saves are listed here.")); return; }
    const kinds = Object.entries(R.data.eventCounts);
    const pick = R.el("select", { "aria-label": "Kind of event", onchange: () => render() }, R.el("option", { value: "" }, `all kinds (${R.data.eventTotal})`),
      ...kinds.map(([kind, count]) => R.el("option", { value: kind }, `${R.plain(kind.replace(/_/g, " "))} (${count})`)));
    let limit = 30;
    const render = () => {
      const found = folded(events.filter((e) => !pick.value || e.kind === pick.value));
      const more = found.length > limit && R.el("button", { type: "button", class: "more", onclick: () => { limit += 200; render(); } }, `Show more (${found.length - limit} left)`);
      R.replace(body, R.el("ol", { class: "events" }, ...found.slice(0, limit).map(eventNode)), more || "",
        R.data.eventTotal > events.length ? R.el("p", { class: "hint" }, `The newest ${events.length} of ${R.data.eventTotal}; all are in events.jsonl.`) : "");
    };
    R.byId("event-tools").append(pick);
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

  R.setUpConfig = () => {
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
