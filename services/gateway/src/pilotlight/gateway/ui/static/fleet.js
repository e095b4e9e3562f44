import { bar, element, pill, segment } from "./dom.js";
import { bytes, count, percent, seconds, short } from "./format.js";
import { List } from "./list.js";
import { follow } from "./stream.js";

const say = (id, text) => { document.getElementById(id).textContent = text; };
const sum = (rows, value) => rows.reduce((total, row) => total + value(row), 0);
const devices = (row) => Object.values(row.kinds).reduce((total, number) => total + number, 0);
const link = (href, text) => element("a", { href }, text);

function memory(row) {
  const shares = row.shares.map((share) => ({ size: share.size_bytes, kind: segment(share.model), title: `${share.model || "others"}: ${bytes(share.size_bytes)}` }));
  return element("div", {}, bar(shares, row.memory_bytes, `${bytes(row.used_bytes)} of ${bytes(row.memory_bytes)}`), element("small", {}, `${bytes(row.used_bytes)} of ${bytes(row.memory_bytes)}`));
}

function pool(row) {
  const used = { size: row.pool_used_bytes, kind: "bar-fill", title: bytes(row.pool_used_bytes) };
  return element("div", {}, bar([used], row.pool_bytes, `host pool ${percent(row.pool_used_bytes, row.pool_bytes)} in use`), element("small", {}, `${bytes(row.pool_used_bytes)} of ${bytes(row.pool_bytes)}`));
}

const nodes = new List(document.getElementById("nodes"), {
  label: "Nodes",
  key: (row) => row.key,
  columns: [
    { title: "Node", width: "19%", value: (row) => row.key, cell: (row) => element("span", {}, link(`/ui/nodes/${row.key}`, short(row.key)), " ", element("small", {}, row.host)) },
    { title: "State", width: "9%", value: (row) => row.state, cell: (row) => pill(row.state) },
    { title: "Devices", width: "12%", value: (row) => devices(row), cell: (row) => element("span", {}, Object.entries(row.kinds).map(([kind, number]) => `${number} × ${kind}`).join(", ") || "none", row.unwell ? pill("failed", `${row.unwell} degraded or failed`) : null) },
    { title: "Device memory, by model", width: "24%", value: (row) => row.used_bytes, cell: memory },
    { title: "Host pool", width: "16%", value: (row) => row.pool_used_bytes, cell: pool },
    { title: "Running", width: "10%", number: true, value: (row) => row.running + row.queued, cell: (row) => element("span", {}, count(row.running), row.queued ? element("small", {}, ` + ${count(row.queued)} queued`) : null) },
    { title: "Fetching", width: "10%", number: true, value: (row) => row.bytes_per_s, cell: (row) => (row.transfers ? `${bytes(row.bytes_per_s)}/s` : "–") },
  ],
});

const transfers = new List(document.getElementById("transfers"), {
  label: "Transfers",
  key: (row) => row.key,
  columns: [
    { title: "Model", width: "22%", value: (row) => row.model, cell: (row) => (row.model ? link(`/ui/models/${row.model}`, row.model) : short(row.digest)) },
    { title: "To", width: "16%", value: (row) => row.node_id, cell: (row) => link(`/ui/nodes/${row.node_id}`, short(row.node_id)) },
    { title: "Progress", width: "26%", value: (row) => row.done_bytes / Math.max(1, row.total_bytes), cell: (row) => element("div", {}, bar([{ size: row.done_bytes, kind: "bar-fill", title: "fetched" }], row.total_bytes, percent(row.done_bytes, row.total_bytes)), element("small", {}, `${bytes(row.done_bytes)} of ${bytes(row.total_bytes)}`)) },
    { title: "Speed", width: "11%", number: true, value: (row) => row.bytes_per_s ?? 0, cell: (row) => (row.bytes_per_s ? `${bytes(row.bytes_per_s)}/s` : "–") },
    { title: "Left", width: "8%", number: true, value: (row) => (row.total_bytes - row.done_bytes) / (row.bytes_per_s || 1), cell: (row) => seconds(row.bytes_per_s ? (row.total_bytes - row.done_bytes) / row.bytes_per_s : null) },
    { title: "From", width: "17%", value: (row) => row.origins.join(), cell: (row) => element("small", { title: row.origins.join(", ") }, row.origins.join(", ") || "–") },
  ],
});

const origin = (row) => (row.kind === "peer" ? link(`/ui/nodes/${row.origin}`, short(row.origin)) : row.origin);
const links = new List(document.getElementById("links"), {
  label: "Links",
  key: (row) => row.key,
  columns: [
    { title: "From", width: "30%", value: (row) => row.origin, cell: (row) => element("span", { title: row.origin }, origin(row)) },
    { title: "Kind", width: "12%", value: (row) => row.kind, cell: (row) => row.kind },
    { title: "To", width: "20%", value: (row) => row.node_id, cell: (row) => link(`/ui/nodes/${row.node_id}`, short(row.node_id)) },
    { title: "Gave when last busy", width: "16%", number: true, value: (row) => row.bytes_per_s, cell: (row) => (row.bytes_per_s ? `${bytes(row.bytes_per_s)}/s` : "–") },
    { title: "Fetches now", width: "10%", number: true, value: (row) => row.transfers, cell: (row) => count(row.transfers) },
    { title: "They have of it", width: "12%", number: true, value: (row) => row.moved_bytes, cell: (row) => (row.transfers ? bytes(row.moved_bytes) : "–") },
  ],
});

const layers = (row) => row.stages.map((stage) => `${stage.start}–${stage.stop - 1} on ${short(stage.node_id)}`).join(", ");
const groups = new List(document.getElementById("groups"), {
  label: "Groups",
  key: (row) => row.key,
  columns: [
    { title: "Model", width: "22%", value: (row) => row.model, cell: (row) => link(`/ui/models/${row.model}`, row.model) },
    { title: "State", width: "13%", value: (row) => row.state, cell: (row) => pill(row.state) },
    { title: "Layers, the lead first", width: "37%", value: layers, cell: (row) => element("small", { title: layers(row) }, layers(row)) },
    { title: "Nodes", width: "8%", number: true, value: (row) => row.nodes, cell: (row) => count(row.nodes) },
    { title: "In flight", width: "9%", number: true, value: (row) => row.in_flight, cell: (row) => count(row.in_flight) },
    { title: "Becomes", width: "11%", number: true, value: (row) => row.targets, cell: (row) => `${count(row.targets)} ${row.targets === 1 ? "instance" : "instances"}` },
  ],
});

function tiles(rows) {
  const ready = rows.filter((row) => row.state === "ready").length;
  say("tile-nodes", count(rows.length));
  say("tile-nodes-more", ready === rows.length ? "all ready" : `${count(ready)} ready, ${count(rows.length - ready)} not`);
  const unwell = sum(rows, (row) => row.unwell);
  say("tile-devices", count(sum(rows, devices)));
  say("tile-devices-more", unwell ? `${count(unwell)} degraded or failed` : "none known to be unwell");
  const used = sum(rows, (row) => row.used_bytes);
  const whole = sum(rows, (row) => row.memory_bytes);
  say("tile-memory", percent(used, whole));
  say("tile-memory-more", `${bytes(used)} of ${bytes(whole)}`);
  const pooled = sum(rows, (row) => row.pool_used_bytes);
  const pools = sum(rows, (row) => row.pool_bytes);
  say("tile-pool", percent(pooled, pools));
  say("tile-pool-more", `${bytes(pooled)} of ${bytes(pools)}`);
  say("tile-requests", count(sum(rows, (row) => row.running)));
  say("tile-requests-more", `running, ${count(sum(rows, (row) => row.queued))} queued`);
  const moving = sum(rows, (row) => row.transfers);
  say("tile-fetch", moving ? `${bytes(sum(rows, (row) => row.bytes_per_s))}/s` : "nothing");
  say("tile-fetch-more", moving ? `${count(moving)} transfers` : "");
}

const find = document.getElementById("nodes-find");
let known = [];
const matching = () => {
  const wanted = find.value.trim().toLowerCase();
  const fits = (row) => row.key.includes(wanted) || row.host.toLowerCase().includes(wanted) || row.shares.some((share) => share.model.toLowerCase().includes(wanted));
  const rows = wanted ? known.filter(fits) : [...known];
  say("nodes-count", wanted ? `${count(rows.length)} of ${count(known.length)}` : "");
  nodes.show(rows);
};
find.addEventListener("input", matching);

const lists = { transfers, links, groups };
follow(["nodes", ...Object.keys(lists)], (topic, rows) => {
  const all = [...rows.values()];
  if (topic in lists) { lists[topic].show(all); say(`${topic}-count`, all.length ? count(all.length) : ""); return; }
  known = all;
  tiles(known);
  matching();
});
