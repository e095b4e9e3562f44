// Shows results of simulations, from a file that stays in the browser.
import { bar, drawn, element } from "./dom.js";
import { count, seconds } from "./format.js";

const part = (id) => document.getElementById(id);
const MAX_BYTES = 16 * 1024 * 1024;
const WIDE = 900, HIGH = 300, EDGE = 44;
const rate = (value) => value.toFixed(4);
// Of both kinds of simulations: what is shown of a field, in this order.
const COLUMNS = [
  ["ttft_attainment", "TTFT attained", rate], ["tpot_attainment", "TPOT attained", rate], ["ttft_p50_s", "TTFT p50", seconds],
  ["ttft_p99_s", "TTFT p99", seconds], ["device_seconds", "Device s", count], ["starts", "Starts", count], ["stages", "Stages", count],
  ["load_s_per_request", "Load a request", seconds], ["reload_s_per_request", "Reload a request", seconds], ["hit_ratio", "Hits", rate],
  ["p99_load_s", "p99 load", seconds], ["reloads", "Reloads", count], ["evictions", "Evictions", count], ["requests", "Requests", count],
];

// Not by name: two policies of one file never have the same colour.
const colour = (rows, row) => `seg-${(rows.indexOf(row) % 8) + 1}`;

export function read(text) {
  const rows = text.split("\n").filter((line) => line.trim()).map((line, number) => {
    try { return JSON.parse(line); } catch { throw new Error(`Line ${number + 1} is no JSON: give what pilotlight simulate --json wrote.`); }
  });
  if (!rows.length || rows.some((row) => typeof row?.policy !== "string")) throw new Error("This is no result of a simulation: each line names its policy.");
  return rows;
}

function table(rows) {
  const columns = COLUMNS.filter(([name]) => rows.some((row) => typeof row[name] === "number"));
  const head = element("tr", {}, element("th", { scope: "col" }, "Policy"), ...columns.map(([, title]) => element("th", { scope: "col", class: "number" }, title)));
  const body = rows.map((row) => element("tr", {}, element("th", { scope: "row" }, row.policy), ...columns.map(([name, , say]) => element("td", { class: "number" }, typeof row[name] === "number" ? say(row[name]) : "–"))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

const legend = (rows) => element("p", { class: "legend" }, ...rows.map((row) => {
  const dot = drawn("svg", { class: "dot", "aria-hidden": "true" });
  dot.append(drawn("rect", { class: colour(rows, row), width: 10, height: 10, rx: 2 }));
  return element("span", {}, dot, row.policy);
}));

// Distribution functions on a logarithmic axis of time.
function curves(rows) {
  const times = rows.flatMap((row) => row.ttft_quantiles_s.filter((value) => value > 0));
  const low = Math.log10(Math.max(1e-3, Math.min(...times))), high = Math.max(low + 0.1, Math.log10(Math.max(...times)));
  const x = (value) => EDGE + ((WIDE - 2 * EDGE) * (Math.log10(Math.max(value, 10 ** low)) - low)) / (high - low);
  const y = (share) => HIGH - EDGE - (HIGH - 2 * EDGE) * share;
  const svg = drawn("svg", { class: "plot", viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": "Time to first token by policy; the table has the figures." });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) svg.append(drawn("line", { class: "grid", x1: EDGE, x2: WIDE - EDGE, y1: y(share), y2: y(share) }), drawn("text", { x: EDGE - 8, y: y(share) + 4, "text-anchor": "end" }, String(share)));
  for (let power = Math.ceil(low); power <= high; power += 1) svg.append(drawn("line", { class: "grid", x1: x(10 ** power), x2: x(10 ** power), y1: EDGE, y2: HIGH - EDGE }), drawn("text", { x: x(10 ** power), y: HIGH - EDGE + 18, "text-anchor": "middle" }, seconds(10 ** power)));
  for (const row of rows) {
    const points = row.ttft_quantiles_s.flatMap((value, number) => (value === null ? [] : [`${x(value).toFixed(1)},${y((number + 1) / 100).toFixed(1)}`]));
    svg.append(drawn("polyline", { class: `curve ${colour(rows, row)}`, points: points.join(" ") }));
  }
  return svg;
}

function attained(rows) {
  const names = Object.keys(rows[0].applications);
  const head = element("tr", {}, element("th", { scope: "col" }, "Application"), ...rows.map((row) => element("th", { scope: "col" }, row.policy)));
  const body = names.map((name) => element("tr", {}, element("th", { scope: "row" }, name), ...rows.map((row) => {
    const share = row.applications[name]?.ttft_attainment ?? 0;
    return element("td", {}, bar([{ size: share, kind: colour(rows, row), title: rate(share) }], 1, `${row.policy}: ${rate(share)}`), element("small", {}, rate(share)));
  })));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

function show(rows) {
  const told = rows.filter((row) => row.ttft_quantiles_s?.some((value) => value > 0));
  const applied = rows.filter((row) => row.applications);
  part("s-scenario").textContent = rows[0].scenario ?? rows[0].workload ?? "";
  part("s-table").replaceChildren(table(rows));
  part("s-curves").replaceChildren(...(told.length ? [curves(told), legend(told)] : []));
  part("s-bars").replaceChildren(...(applied.length ? [attained(applied)] : []));
  part("s-first").hidden = !told.length;
  part("s-apps").hidden = !applied.length;
}

part("s-file").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (!file) return;
  const failure = part("s-failure");
  try {
    if (file.size > MAX_BYTES) throw new Error("This file has more than 16 MiB.");
    show(read(await file.text()));
    failure.hidden = true;
    part("s-results").hidden = false;
  } catch (error) {
    failure.textContent = error.message;
    failure.hidden = false;
    part("s-results").hidden = true;
  }
});
