// The page: follows the events of the server, keeps what they say, and shows it.

import { accountPage } from "./account.js";
import { actions, enterToken, forgetToken, hasToken, shortcuts } from "./dialogs.js";
import { h, patch } from "./dom.js";
import { groupPage } from "./group.js";

const bar = document.getElementById("bar");
const main = document.getElementById("main");
const notice = document.getElementById("notice");

const views = new Map();
let events = null;
let isLive = false;
let mayAct = false;
let filter = "";
let group = null;
let due = 0;
const local = { partition: null, member: null, point: (id) => choose("partition", id), light: (name) => choose("member", name) };

const act = actions(notify);

// ---- events --------------------------------------------------------------------------------------------------

function follow() {
  events?.close();
  events = new EventSource(group === null ? "/events" : `/events?group=${encodeURIComponent(group)}`);
  events.addEventListener("hello", (event) => { isLive = true; mayAct = JSON.parse(event.data).may_act; show(); });
  events.addEventListener("view", (event) => {
    const { section, view } = JSON.parse(event.data);
    views.set(section, view);
    show();
  });
  events.addEventListener("patch", (event) => {
    const { section, patch: change } = JSON.parse(event.data);
    const began = performance.now();
    views.set(section, merged(views.get(section), change));
    show(began);
  });
  events.addEventListener("error", () => { isLive = false; show(); });
}

/** A merge patch (RFC 7396). */
function merged(before, change) {
  const after = { ...before };
  for (const name in change) {
    const value = change[name];
    if (value === null) delete after[name];
    else if (typeof value === "object" && !Array.isArray(value)) after[name] = merged(after[name] ?? {}, value);
    else after[name] = value;
  }
  return after;
}

// ---- showing -------------------------------------------------------------------------------------------------

function show(began) {
  if (due) return;
  due = requestAnimationFrame(() => {
    due = 0;
    render();
    if (began !== undefined) performance.measure("update", { start: began, end: performance.now() });
  });
}

function render() {
  const account = views.get("account");
  patch(bar, top(account));
  const view = group === null ? account : views.get(group);
  if (!view) return;
  patch(main, group === null
    ? accountPage(view, filter, (text) => { filter = text; show(); })
    : groupPage(view, local, mayAct ? act : null));
  document.title = group === null ? "keylane" : `${view.name ?? "gone"} · keylane`;
  if (!performance.getEntriesByName("shown").length) performance.mark("shown");
}

function top(account) {
  const isFine = isLive && !account?.trouble;
  return [
    h("a", { class: "brand", href: "#/" }, "keylane"),
    h("span", { class: `live ${isFine ? "on" : "off"}`, role: "status" },
      !isLive ? "not connected" : account?.trouble ? "cannot read" : "live"),
    h("span", { class: "server" }, account?.server ?? ""),
    h("span", { class: "space" }),
    mayAct && h("button", { type: "button", class: "small", on: { click: lock } }, hasToken() ? "Lock actions" : "Unlock actions"),
    h("button", { type: "button", class: "small", "aria-label": "Keys", on: { click: () => shortcuts() } }, "?"),
    account?.trouble && h("p", { class: "trouble", role: "alert" }, account.trouble),
  ];
}

async function lock() {
  if (hasToken()) forgetToken();
  else await enterToken();
  show();
}

function choose(what, value) {
  if (local[what] === value) return;
  local[what] = value;
  show();
}

let notified = 0;

function notify(text, isBad = false) {
  clearTimeout(notified);
  patch(notice, [h("p", { class: isBad ? "bad" : "" }, text)]);
  notified = setTimeout(() => patch(notice, []), isBad ? 12000 : 6000);
  show();
}

// ---- where we are, and keys --------------------------------------------------------------------------------------

function navigate() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
  const before = group;
  group = parts.length === 3 ? parts.join("/") : null;
  if (before !== null && before !== group) views.delete(before);
  local.partition = null;
  local.member = null;
  patch(main, [h("p", { class: "quiet" }, "Reading…")]);
  window.scrollTo(0, 0);
  follow();
  show();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const isTyping = event.target.closest("input, textarea");
  if (event.key === "Escape") {
    if (isTyping) event.target.blur();
    else if (group !== null) location.hash = "#/";
    return;
  }
  if (isTyping) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("filter")?.focus();
  } else if (event.key === "?") {
    shortcuts();
  } else if (event.key === "j" || event.key === "k") {
    const links = [...document.querySelectorAll("a.group")];
    const at = links.indexOf(document.activeElement) + (event.key === "j" ? 1 : -1);
    links[Math.min(links.length - 1, Math.max(0, at))]?.focus();
  }
});

window.addEventListener("hashchange", navigate);
navigate();
