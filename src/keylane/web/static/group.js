// A group in full: its partitions, members, timeline, and what it gave up.

import { sentence } from "./account.js";
import { h } from "./dom.js";
import { age, bytes, count, counted, hue, iso, when } from "./text.js";

const WORD = { fleet: "worker", marshal: "consumer" };
const ROOMY = 48;
const FULL_LAG = 1000;
const OLD_S = 10;

/** `local`: what this browser knows of the group beside the view: the partition and the member that are pointed at. */
export function groupPage(group, local, act) {
  if (group.is_gone) return [h("p", { class: "quiet", key: "gone" }, "This group does not exist any more. ", back())];
  const word = WORD[group.kind] ?? "member";
  return [
    h("nav", { class: "crumbs", key: "crumbs", "aria-label": "Where you are" }, back(), " / ", group.stream),
    h("div", { class: `lead ${group.standing}`, key: "lead" },
      h("h1", {}, h("span", { class: "mark", "aria-hidden": "true" }), sentence(group))),
    group.change && h("p", { class: "band", key: "change" }, group.change),
    group.problem && h("p", { class: "band bad", key: "problem" }, group.problem),
    figures(group),
    partitions(group, local),
    members(group, word, local, act),
    parked(group, act),
    deadLetters(group, act),
    timeline(group),
  ];
}

const back = () => h("a", { href: "#/" }, "All groups");

function figures(group) {
  const facts = [
    ["lag", count(group.lag)],
    ["oldest waiting", group.lag === 0 ? "none" : age(group.age)],
    ["in flight", count(group.in_flight)],
    ["redelivered", count(group.redelivered)],
    ["dead letters", count(group.dead_letter_count)],
    ["parked keys", count(group.parked_key_count)],
  ];
  if (group.queue) {
    const fill = group.queue.fill === undefined ? "" : `, ${Math.round(group.queue.fill * 100)} % full`;
    facts.push(["queue", `${bytes(group.queue.bytes)}${fill}`]);
    if (group.queue.source_lag) facts.push(["not copied yet", count(group.queue.source_lag)]);
  }
  const shown = group.kind === "marshal" ? facts.slice(0, 2) : facts;
  return h("dl", { class: "figures", key: "figures" }, shown.map(([name, value]) =>
    h("div", { key: name, class: value === "unknown" ? "unknown" : "" }, h("dt", {}, name), h("dd", {}, value))));
}

function section(key, title, aside, ...content) {
  return h("section", { key, class: "part", "aria-labelledby": `title-${key}` },
    h("div", { class: "head" }, h("h2", { id: `title-${key}` }, title), aside), content);
}

const button = (label, onClick, name) =>
  h("button", { type: "button", class: "small", "aria-label": name, on: { click: onClick } }, label);

// ---- partitions ----------------------------------------------------------------------------------------------

function partitions(group, local) {
  const all = Object.entries(group.partitions).sort((a, b) => a[1].place - b[1].place);
  if (!all.length) return null;
  const ids = all.map(([id]) => id);
  const chosen = group.partitions[local.partition] ? local.partition : null;
  const roomy = all.length <= ROOMY;
  return section("partitions", counted(all.length, "partition"),
    h("p", { class: "aside", id: "partition-text" }, chosen !== null ? partitionText(chosen, group) : legend()),
    h("div", {
      class: `strip${roomy ? " roomy" : ""}${local.member ? " dimmed" : ""}`,
      role: "listbox", tabindex: "0", "aria-label": "Partitions, coloured by owner",
      "aria-activedescendant": chosen !== null ? `p-${ids.indexOf(chosen)}` : null,
      on: {
        pointerover: (event) => event.target.closest(".cell") && local.point(event.target.closest(".cell").laneKey),
        pointerleave: () => local.point(null),
        focus: () => local.partition ?? local.point(ids[0]),
        keydown: (event) => {
          const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -ids.length, End: ids.length }[event.key];
          if (!step) return;
          event.preventDefault();
          const at = Math.max(0, ids.indexOf(local.partition));
          local.point(ids[Math.min(ids.length - 1, Math.max(0, at + step))]);
        },
      },
    }, all.map(([id, one]) => cell(id, one, group, local, chosen === id, roomy))));
}

function cell(id, one, group, local, isChosen, roomy) {
  const owner = group.members[one.owner];
  const fill = one.lag === undefined ? 0 : Math.min(1, Math.log10(1 + one.lag) / Math.log10(1 + FULL_LAG));
  const classes = ["cell"];
  if (one.owner === undefined) classes.push("unowned");
  else if (one.assigned !== undefined) classes.push("moving");
  if (one.lag === undefined) classes.push("unsure");
  if (one.age > OLD_S) classes.push("old");
  if (isChosen) classes.push("chosen");
  if (local.member && local.member === one.owner) classes.push("lit");
  return h("div", {
    key: id, id: `p-${one.place}`, role: "option", class: classes.join(" "), "aria-selected": isChosen ? "true" : "false",
    "aria-label": partitionText(id, group),
    style: { "--hue": owner ? hue(owner.place) : "0", "--fill": fill.toFixed(2) },
  }, roomy && [h("b", {}, id), h("span", {}, one.lag === undefined ? "?" : count(one.lag))]);
}

function partitionText(id, group) {
  const one = group.partitions[id];
  const owner = one.owner === undefined ? "nobody handles it" : one.owner;
  const coming = one.assigned === undefined ? "" : `, assigned to ${one.assigned}`;
  const waits = one.lag === 0 ? "lag 0" : `lag ${count(one.lag)}, ${one.age === undefined ? "age unknown" : age(one.age)}`;
  const flight = one.in_flight ? `, ${count(one.in_flight)} in flight` : "";
  return `Partition ${id}: ${owner}${coming}; ${waits}${flight}`;
}

const legend = () => "The colour is the owner; the higher the fill, the more waits.";

// ---- members -------------------------------------------------------------------------------------------------

function members(group, word, local, act) {
  const all = Object.entries(group.members).sort((a, b) => a[1].place - b[1].place);
  const title = all.length ? counted(all.length, word) : `No ${word}s`;
  const hosts = all.some(([, one]) => one.host !== undefined);
  const standbys = all.some(([, one]) => one.standbys !== undefined);
  const isMarshal = group.kind === "marshal";
  const columns = [
    [word, (name, one) => [h("i", { class: "swatch", style: { "--hue": hue(one.place) } }), h("b", {}, name), tags(one)]],
    ["state", (name, one) => h("span", { class: `state ${one.is_active ? "on" : "off"}` }, one.state)],
    hosts && ["runs on", (name, one) => one.host === undefined ? "" : `${one.host}${one.pid === undefined ? "" : ` · ${one.pid}`}`],
    standbys && ["standbys", (name, one) => one.standbys === undefined ? "" : count(one.standbys), "number"],
    ["partitions", (name, one) => h("span", { class: "clip", title: one.partitions }, one.count ? `${one.count} · ${one.partitions}` : "none")],
    ["lag", (name, one) => count(one.lag), "number"],
    ["oldest", (name, one) => one.lag === 0 ? "none" : age(one.age), "number"],
    !isMarshal && ["in flight", (name, one) => flight(one), "number"],
    !isMarshal && ["redelivered", (name, one) => one.redelivered === undefined ? "" : count(one.redelivered), "number"],
    act && !isMarshal && ["", (name, one) => actions(group, name, one, act), "acts"],
  ].filter(Boolean);
  return section("members", title, act && groupActions(group, act),
    all.length > 0 && h("table", {},
      h("thead", {}, h("tr", {}, columns.map(([label, , kind]) => h("th", { scope: "col", class: kind }, label)))),
      h("tbody", {}, all.map(([name, one]) => h("tr", {
        key: name, class: local.member === name ? "lit" : "",
        on: { pointerenter: () => local.light(name), pointerleave: () => local.light(null) },
      }, columns.map(([label, show, kind]) => h("td", { class: kind, "data-label": label }, show(name, one))))))));
}

function tags(one) {
  const found = [one.is_leader && "leader", one.is_drained && "paused", one.is_paused && "paused", ...one.labels].filter(Boolean);
  return found.map((tag) => h("em", { class: "tag" }, tag));
}

function flight(one) {
  if (one.in_flight === undefined) return "";
  return one.max_in_flight === undefined ? count(one.in_flight) : h("span", {}, count(one.in_flight), h("small", {}, ` / ${count(one.max_in_flight)}`));
}

function groupActions(group, act) {
  const given = {
    elastic: [
      button("Add members…", () => act.ask(group, "add")),
      button("Apply plan…", () => act.ask(group, "apply-plan")),
    ],
    fleet: [button("Repartition…", () => act.ask(group, "repartition"))],
    marshal: [group.is_paused
      ? button("Resume…", () => act.run(group, "resume-group", {}))
      : button("Pause…", () => act.ask(group, "pause-group"))],
  }[group.kind];
  return given && h("div", { class: "acts" }, given);
}

function actions(group, name, one, act) {
  if (group.kind === "fleet") {
    return one.is_drained
      ? button("Resume", () => act.run(group, "resume", { member: name }), `Resume ${name}`)
      : button("Pause", () => act.run(group, "pause", { member: name }), `Pause ${name}`);
  }
  return [
    one.pin !== undefined
      && button("Step down", () => act.run(group, "step-down", { member: name, kind: group.kind }), `Let ${name} step down`),
    group.kind === "elastic" && one.state !== "leaving"
      && button("Drop", () => act.run(group, "drop", { members: [name] }), `Drop ${name}`),
  ];
}

// ---- what was given up, and what happened -------------------------------------------------------------------------

function parked(group, act) {
  const all = Object.entries(group.parked);
  if (!all.length) return null;
  return section("parked", counted(group.parked_key_count ?? all.length, "parked key"), null,
    h("ul", { class: "letters" }, all.map(([key, one]) => letter(key, one, `${key}`,
      `${counted(one.messages, "message")} waiting, partition ${one.partition}`,
      one.is_releasing ? h("em", { class: "tag" }, "being released")
        : act && button("Release", () => act.run(group, "release", { key }), `Release key ${key}`)))));
}

function deadLetters(group, act) {
  const all = Object.entries(group.dead_letters);
  if (!all.length) return null;
  const total = group.dead_letter_count ?? all.length;
  const note = total > all.length && h("p", { class: "aside" }, `the oldest ${all.length}; keylane dlq ls ${group.stream} has all`);
  return section("dead-letters", counted(total, "dead letter"), note,
    h("ul", { class: "letters" }, all.map(([sequence, one]) => letter(sequence, one, one.subject,
      `key ${one.key || "none"}, partition ${one.partition}`,
      act && button("Replay", () => act.run(group, "replay", { sequence: one.sequence }), `Replay dead letter ${sequence}`)))));
}

function letter(key, one, title, about, action) {
  return h("li", { key },
    h("details", {},
      h("summary", {},
        h("b", {}, title), h("span", { class: "error" }, one.error), h("span", { class: "aside" }, about)),
      h("p", { class: "aside" },
        `${one.subject} · sequence ${count(one.source_sequence)} · ${counted(one.tries, "try").replace("trys", "tries")} by ${one.member || "unknown"} · ${bytes(one.size)} · `,
        h("time", { datetime: iso(one.at) }, when(one.at))),
      one.traceback ? h("pre", { tabindex: "0", "aria-label": "Traceback" }, one.traceback) : h("p", { class: "aside" }, "It carries no traceback.")),
    action);
}

function timeline(group) {
  const note = group.kind === "fleet" ? "the last 100 assignments" : "what was seen while this page was open";
  return section("timeline", "Timeline", h("p", { class: "aside" }, note),
    group.timeline.length === 0
      ? h("p", { class: "quiet" }, "Nothing has moved.")
      : h("ol", { class: "timeline" }, group.timeline.map((one, at) => h("li", { key: `${one.at} ${one.text} ${group.timeline.length - at}` },
        h("time", { datetime: iso(one.at) }, when(one.at)),
        h("em", { class: `tag ${one.cause}` }, one.cause),
        h("div", {}, one.text, one.moves.length > 0 && h("ul", {}, one.moves.map((move) => h("li", {}, move))))))));
}
