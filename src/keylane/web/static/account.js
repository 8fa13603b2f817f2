// The account: every stream, and its groups with a sentence each.

import { h } from "./dom.js";
import { bytes, count, counted, hue } from "./text.js";

const KIND = { elastic: "elastic group", static: "static group", fleet: "fleet", marshal: "Marshal group" };
const TROUBLED = ["unreadable", "stopped", "behind", "empty", "paused"];

export const link = (id) => `#/${id.split("/").map(encodeURIComponent).join("/")}`;

export function accountPage(account, filter, onFilter) {
  const wanted = filter.trim().toLowerCase();
  const groups = Object.entries(account.groups).filter(([, one]) =>
    `${one.stream} ${one.name} ${one.kind} ${one.summary}`.toLowerCase().includes(wanted));
  const names = [...new Set([...Object.keys(account.streams), ...groups.map(([, one]) => one.stream)])].sort();
  const shown = names
    .map((name) => [name, groups.filter(([, one]) => one.stream === name)])
    .filter(([name, own]) => own.length || (!wanted ? true : name.toLowerCase().includes(wanted)));
  return [
    h("div", { class: "lead", key: "lead" },
      h("h1", {}, headline(Object.values(account.groups))),
      h("input", {
        type: "search", id: "filter", class: "filter", placeholder: "Filter   /", "aria-label": "Filter streams and groups",
        on: { input: (event) => onFilter(event.target.value) },
      })),
    ...shown.filter(([, own]) => own.length).map(([name, own]) => stream(name, account.streams[name], own)),
    others(shown.filter(([, own]) => !own.length), account),
    !shown.length && h("p", { class: "quiet", key: "none" }, wanted ? "Nothing matches." : firstSteps()),
  ];
}

function headline(groups) {
  if (!groups.length) return "No groups yet";
  const bad = groups.filter((one) => TROUBLED.includes(one.standing)).length;
  if (bad) return `${bad} of ${counted(groups.length, "group")} ${bad === 1 ? "needs" : "need"} a look`;
  const marked = groups.filter((one) => one.needs_look).length;
  return marked ? `All groups work, ${marked} with something left over` : `All ${counted(groups.length, "group")} at work`;
}

const firstSteps = () => "This account has no stream. `keylane stream create` makes one.";

function stream(name, known, groups) {
  return h("section", { class: "stream", key: `stream ${name}`, "aria-label": `stream ${name}` },
    h("h2", {}, name, known && h("span", { class: "aside" },
      `${count(known.messages)} messages, ${bytes(known.bytes)}`)),
    h("ul", { class: "groups" }, groups.map(([id, one]) => row(id, one))));
}

function row(id, one) {
  const marked = (one.standing === "good" || one.standing === "working") && one.needs_look;
  return h("li", { key: id },
    h("a", { class: `group ${one.standing}${marked ? " marked" : ""}`, href: link(id) },
      h("span", { class: "mark", "aria-hidden": "true" }),
      h("span", { class: "sentence" }, sentence(one)),
      h("span", { class: "kind" }, KIND[one.kind]),
      h("span", { class: "shares", "aria-hidden": "true" },
        one.shares.map((size, place) => size > 0 && h("i", { style: { "--hue": hue(place), "flex-grow": String(size) } })),
        one.unowned > 0 && h("i", { class: "unowned", style: { "flex-grow": String(one.unowned) } }))));
}

/** The name stands out of the sentence that begins with it. */
export function sentence(one) {
  return one.summary.startsWith(one.name) ? [h("b", {}, one.name), one.summary.slice(one.name.length)] : one.summary;
}

function others(streams, account) {
  if (!streams.length) return null;
  return h("section", { class: "stream", key: "others", "aria-label": "streams without groups" },
    h("h2", {}, "Streams without groups"),
    h("ul", { class: "plain" }, streams.map(([name]) => h("li", { key: name },
      h("b", {}, name), ` ${count(account.streams[name].messages)} messages, ${bytes(account.streams[name].bytes)}, `
      + counted(account.streams[name].consumers, "consumer")))));
}
