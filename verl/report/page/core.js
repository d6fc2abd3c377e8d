// Shared by all parts of the page: the data, DOM building, number formats, text made safe to look at, state.
"use strict";
window.addEventListener("error", (event) => {
  const root = document.documentElement;
  root.dataset.errors = (root.dataset.errors || "") + event.message + " @" + event.lineno + "\n";
});

const R = { data: JSON.parse(document.getElementById("run-data").textContent) };

R.byId = (id) => document.getElementById(id);

// el("td", {class: "x", onclick: f}, "text", node): text becomes text nodes, never markup.
R.el = (tag, props, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else if (key === "style") Object.assign(node.style, value);
    else if (key in node && typeof value === "boolean") node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return node;
};

R.svg = (tag, props) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(props)) node.setAttribute(key, value);
  return node;
};

R.replace = (node, ...children) => { node.replaceChildren(...children); return node; };

// Control, format and unpaired characters can hide or reorder text; they are shown by number instead.
// Joiners stay: emoji and several scripts are written with them.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu;
const KEEP = new Set(["\n", "\t", "\u200c", "\u200d"]);
const codeName = (ch) => "U+" + ch.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

R.shown = (text) => {
  const parts = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (KEEP.has(match[0])) continue;
    if (match.index > from) parts.push(text.slice(from, match.index));
    parts.push(R.el("span", { class: "ctl", title: "a character that cannot be seen" }, codeName(match[0])));
    from = match.index + match[0].length;
  }
  if (from < text.length) parts.push(text.slice(from));
  return parts;
};

R.plain = (text) => text.replace(HIDDEN, (ch) => (KEEP.has(ch) ? ch : "‹" + codeName(ch) + "›"));

R.num = (x) => {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const a = Math.abs(x);
  if (a === 0) return "0";
  if (Number.isInteger(x) && a < 1e6) return x.toLocaleString("en-US");
  if (a >= 1e6) return (x / 1e6).toPrecision(3).replace(/\.?0+$/, "") + " M";
  if (a >= 1000) return Math.round(x).toLocaleString("en-US");
  if (a < 1e-3) return x.toExponential(2).replace(/\.?0+e/, "e").replace("e-", "e−").replace("-", "−");
  return String(Number(x.toPrecision(a < 1 ? 3 : 4))).replace("-", "−");
};

R.duration = (s) => {
  if (s === null || s === undefined || !Number.isFinite(s)) return "–";
  if (s < 1) return Math.round(s * 1000) + " ms";
  if (s < 60) return (s < 10 ? s.toFixed(1) : Math.round(s)) + " s";
  const days = Math.floor(s / 86400), hours = Math.floor(s / 3600) % 24, minutes = Math.floor(s / 60) % 60;
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(s % 60)} s`;
};

R.when = (unix) => (unix === null || unix === undefined ? "" : new Date(unix * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }));
R.clock = (unix) => (unix === null || unix === undefined ? "" : new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" }));

// State survives the live reload. A browser may forbid storage for files: then the page only forgets.
const KEY = "verl-report:" + R.data.folder;
const storage = () => { try { return window.localStorage; } catch (refused) { return null; } };
R.state = (() => {
  const saved = storage();
  try { return JSON.parse((saved && saved.getItem(KEY)) || "{}") || {}; } catch (damaged) { return {}; }
})();
R.save = (changes) => {
  Object.assign(R.state, changes);
  const target = storage();
  if (!target) return;
  try { target.setItem(KEY, JSON.stringify(R.state)); } catch (full) { console.warn("state not kept:", full.message); }
};

R.css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

R.empty = (title, text) => R.el("div", { class: "empty" }, R.el("strong", {}, title), R.el("p", {}, text));

// A row of buttons of which one is pressed.
R.segments = (label, options, value, onpick) => {
  const box = R.el("div", { class: "segments", role: "group", "aria-label": label });
  const buttons = options.map(([key, text, title]) =>
    R.el("button", { type: "button", title, "data-key": key, onclick: () => { pick(key); onpick(key); } }, text));
  const pick = (key) => buttons.forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.key === key)));
  pick(value);
  box.append(...buttons);
  return box;
};
