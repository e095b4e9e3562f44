import { bar, element, pill } from "./dom.js";
import { bytes, count, seconds } from "./format.js";
import { List } from "./list.js";
import { follow } from "./stream.js";

const STATES = ["ready", "starting", "draining", "cold", "failed"];
let known = [];
let wanted = "";

function stateOf(row) {
  if (row.state !== "starting") return pill(row.state, row.reason);
  const share = row.fetched === null ? "" : ` ${Math.round(100 * row.fetched)} %`;
  const shown = element("div", {}, pill("starting"), element("small", {}, ` ${row.phase}${share}`));
  if (row.fetched !== null) shown.append(bar([{ size: row.fetched, kind: "bar-fill", title: "fetched" }], 1, `fetched${share}`));
  return shown;
}

function button(text, name, action, more = {}) {
  return element("button", { type: "button", class: "small", "data-action": action, "aria-label": `${text} ${name}`, ...more }, text);
}

function actions(row) {
  const url = `/admin/v1/models/${row.key}`;
  const pinned = row.pinned;
  return element("div", { class: "actions" },
    row.ready || row.starting
      ? button("Evict", row.key, "POST", { "data-url": `${url}/evict`, "data-confirm": `Drain and release every instance of ${row.key}?`, "data-done": `${row.key} is being released` })
      : button("Warm", row.key, "POST", { "data-url": `${url}/warm`, "data-done": `${row.key} is being warmed` }),
    button(pinned ? "Unpin" : "Pin", row.key, "PATCH", { "data-url": url, "data-body": JSON.stringify({ pinned: !pinned }), "data-done": pinned ? "Unpinned" : "Pinned" }));
}

const list = new List(document.getElementById("models"), {
  label: "Models",
  key: (row) => row.key,
  columns: [
    { title: "Model", width: "27%", value: (row) => row.key, cell: (row) => element("span", {}, element("a", { href: `/ui/models/${row.key}` }, row.key), row.pinned ? " " : "", row.pinned ? pill("pinned") : null) },
    { title: "State", width: "17%", value: (row) => STATES.indexOf(row.state), cell: stateOf },
    { title: "Instances", width: "13%", number: true, value: (row) => row.ready + row.starting, cell: (row) => element("span", {}, `${row.ready}${row.starting ? ` + ${row.starting}` : ""}`, element("small", {}, ` of ${row.min_instances}–${row.max_instances}`)) },
    { title: "In flight", width: "9%", number: true, value: (row) => row.in_flight, cell: (row) => count(row.in_flight) },
    { title: "Size", width: "10%", number: true, value: (row) => row.size_bytes, cell: (row) => bytes(row.size_bytes) },
    { title: "First token in", width: "11%", number: true, value: (row) => row.ttft_ms, cell: (row) => seconds(row.ttft_ms / 1000) },
    { title: "Actions", width: "13%", cell: actions },
  ],
});

const chips = document.getElementById("model-states");
const buttons = new Map(["", ...STATES].map((state) => {
  const made = element("button", { type: "button", "aria-pressed": String(state === "") });
  made.addEventListener("click", () => { wanted = state; draw(); });
  return [state, made];
}));
chips.append(...buttons.values());

const find = document.getElementById("models-find");
find.addEventListener("input", () => draw());

function draw() {
  const text = find.value.trim().toLowerCase();
  const numbers = Object.fromEntries(STATES.map((state) => [state, 0]));
  for (const row of known) numbers[row.state] += 1;
  for (const [state, made] of buttons) {
    made.textContent = state ? `${state} ${count(numbers[state])}` : `all ${count(known.length)}`;
    made.setAttribute("aria-pressed", String(state === wanted));
  }
  list.show(known.filter((row) => (!wanted || row.state === wanted) && (!text || row.key.toLowerCase().includes(text))));
}

follow(["models"], (_, rows) => { known = [...rows.values()]; draw(); });

const dialog = document.getElementById("register");
document.getElementById("register-open").addEventListener("click", () => dialog.showModal());
