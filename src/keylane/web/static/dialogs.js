// Actions: what is needed for one is asked for, then what it will move is shown, and only then it is done.

import { h, patch } from "./dom.js";

const TOKEN = "keylane token";

const FIELDS = {
  add: { title: "Add members", label: "Names, with blanks", read: (text) => ({ members: text.split(/[\s,]+/).filter(Boolean) }) },
  "apply-plan": {
    title: "Apply a plan", label: "Plan: members and their partitions, as JSON", isLong: true, read: (text) => ({ plan: text }),
    start: (group) => JSON.stringify(mapping(group), null, 1).replace(/\n\s+(?=-?\d)|(?<=\d)\n\s+(?=\])/g, " "),
  },
  repartition: { title: "Another number of partitions", label: "Partitions", kind: "number", read: (text) => ({ partitions: Number(text) }) },
  "pause-group": { title: "Pause the group", label: "Minutes", kind: "number", start: () => "5", read: (text) => ({ minutes: Number(text) }) },
};

function mapping(group) {
  const found = {};
  for (const name in group.members) found[name] = [];
  for (const id in group.partitions) {
    const to = group.partitions[id].assigned ?? group.partitions[id].owner;
    (found[to] ??= []).push(Number(id));
  }
  return found;
}

/** What an operator can do. `notify` shows a sentence for a while. */
export function actions(notify) {
  async function run(group, action, args) {
    const request = { action, stream: group.stream, group: group.name, arguments: args };
    try {
      const preview = await post("/actions/preview", request);
      if (!preview) return;
      if (!(await confirm(preview))) return;
      const answer = await post("/actions/perform", { ...request, confirmed: preview });
      if (answer) notify(answer.done);
    } catch (error) {
      notify(error.message, true);
    }
  }
  async function ask(group, action) {
    const field = FIELDS[action];
    const text = await input(`${field.title}: ${group.name}`, field, field.start?.(group) ?? "");
    if (text) await run(group, action, field.read(text));
  }
  return { run, ask };
}

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;

export const forgetToken = () => sessionStorage.removeItem(TOKEN);

export async function enterToken() {
  const text = await input("Unlock actions", { label: "Token, as `keylane web` printed it", kind: "password" }, "");
  if (text) sessionStorage.setItem(TOKEN, text.trim());
  return hasToken();
}

/** null: the user gave up. */
async function post(path, body) {
  for (;;) {
    if (!hasToken() && !(await enterToken())) return null;
    const answer = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Keylane-Token": sessionStorage.getItem(TOKEN) },
      body: JSON.stringify(body),
    });
    const told = await answer.json();
    if (answer.ok) return told;
    if (answer.status !== 401) throw new Error(told.error);
    forgetToken();
  }
}

function confirm(preview) {
  return open(preview.title, (close) => [
    h("div", { class: "lines" }, preview.lines.map((line, at) => h("p", { class: /^\S+ from /.test(line) ? "move" : at ? "more" : "" }, line))),
    buttons(close, preview.button),
  ]);
}

function input(title, field, start) {
  let text = start;
  const listen = { input: (event) => { text = event.target.value; } };
  const control = field.isLong
    ? h("textarea", { id: "answer", rows: "12", spellcheck: "false", on: listen }, start)
    : h("input", { id: "answer", type: field.kind ?? "text", min: "1", value: start, autocomplete: "off", spellcheck: "false", on: listen });
  return open(title, (close) => [
    h("label", { for: "answer" }, field.label), control, buttons(close, "Continue"),
  ]).then((done) => (done ? text : null));
}

function buttons(close, label) {
  return h("div", { class: "buttons" },
    h("button", { type: "button", on: { click: () => close(false) } }, "Cancel"),
    h("button", { type: "submit", class: "main" }, label));
}

export function shortcuts() {
  const keys = [["/", "filter"], ["j, k", "next, previous group"], ["Enter", "open the group"], ["Esc", "back to all groups"],
    ["← → ↑ ↓", "walk through the partitions, when they have the focus"], ["?", "this list"]];
  return open("Keys", (close) => [
    h("dl", { class: "keys" }, keys.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])),
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "main" }, "Close")),
  ]);
}

/** A modal dialog; resolves to whether it was confirmed. Escape and Cancel are no. */
function open(title, content) {
  return new Promise((resolve) => {
    const dialog = document.createElement("dialog");
    const from = document.activeElement;
    const close = (done) => {
      dialog.close();
      dialog.remove();
      from?.focus?.();
      resolve(done);
    };
    dialog.setAttribute("aria-labelledby", "dialog-title");
    dialog.addEventListener("cancel", (event) => { event.preventDefault(); close(false); });
    document.body.append(dialog);
    const submit = (event) => { event.preventDefault(); close(true); };
    patch(dialog, [h("form", { on: { submit } }, h("h2", { id: "dialog-title" }, title), content(close))]);
    dialog.showModal();
    (dialog.querySelector("#answer") ?? dialog.querySelector("button.main")).focus();
  });
}
