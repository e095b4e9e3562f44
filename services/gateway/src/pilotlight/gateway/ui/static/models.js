import { bar, element, pill } from "./dom.js";
import { bytes, count, seconds } from "./format.js";
import { List } from "./list.js";
import { ask, toast } from "./page.js";
import { follow } from "./stream.js";

const STATES = ["ready", "starting", "draining", "cold", "failed"];
const COSTS_EVERY_MS = 60000;
let known = [];
let wanted = "";
let costs = new Map();
let withCosts = new WeakMap();

// A row of the stream with what its model cost: the same object until one of both changes.
function costly(row) {
  let made = withCosts.get(row);
  if (!made) {
    made = { ...row, cost: costs.get(row.key) ?? null };
    withCosts.set(row, made);
  }
  return made;
}

function together(cost) {
  return cost ? cost.device_s + cost.start_device_s + cost.idle_device_s : 0;
}

function costOf({ cost }) {
  if (!cost) return "–";
  const parts = [["requests", cost.device_s], ["cold starts", cost.start_device_s], ["loaded and idle", cost.idle_device_s]];
  const all = together(cost);
  return element("span", { title: parts.map(([name, part]) => `${name} ${seconds(part)}`).join(", ") }, seconds(all),
    all ? element("small", {}, ` ${Math.round((100 * cost.idle_device_s) / all)} % idle`) : "");
}

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
    { title: "Model", width: "22%", value: (row) => row.key, cell: (row) => element("span", {}, element("a", { href: `/ui/models/${row.key}` }, row.key), row.pinned ? " " : "", row.pinned ? pill("pinned") : null) },
    { title: "State", width: "14%", value: (row) => STATES.indexOf(row.state), cell: stateOf },
    { title: "Instances", width: "12%", number: true, value: (row) => row.ready + row.starting, cell: (row) => element("span", {}, `${row.ready}${row.starting ? ` + ${row.starting}` : ""}`, element("small", {}, ` of ${row.min_instances}–${row.max_instances}`)) },
    { title: "In flight", width: "8%", number: true, value: (row) => row.in_flight, cell: (row) => count(row.in_flight) },
    { title: "Size", width: "9%", number: true, value: (row) => row.size_bytes, cell: (row) => bytes(row.size_bytes) },
    { title: "First token in", width: "10%", number: true, value: (row) => row.ttft_ms, cell: (row) => seconds(row.ttft_ms / 1000) },
    { title: "Cost, 30 days", width: "13%", number: true, value: (row) => together(row.cost), cell: costOf },
    { title: "Actions", width: "12%", cell: actions },
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
  list.show(known.filter((row) => (!wanted || row.state === wanted) && (!text || row.key.toLowerCase().includes(text))).map(costly));
}

async function drawCosts() {
  if (document.hidden) return;
  try {
    const { models } = await ask("GET", "/admin/v1/usage/models");
    costs = new Map(models.map((one) => [one.model, one]));
    withCosts = new WeakMap();
    if (known.length) draw();
  } catch (error) {
    toast(error.message, true);
  }
}

follow(["models"], (_, rows) => { known = [...rows.values()]; draw(); });
drawCosts();
setInterval(drawCosts, COSTS_EVERY_MS);
document.addEventListener("visibilitychange", drawCosts);

const dialog = document.getElementById("register");
document.getElementById("register-open").addEventListener("click", () => dialog.showModal());
