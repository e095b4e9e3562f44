// Charts of a model's page, and its verification with progress.
import { element } from "./dom.js";
import { bytes, seconds } from "./format.js";
import { ask, toast } from "./page.js";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plots = new Map();

// The hour of a mark, or its day where days are shown.
function clock(_, marks) {
  const days = marks.length > 1 && marks[marks.length - 1] - marks[0] > 86400;
  const close = marks.length > 1 && marks[1] - marks[0] < 60;
  const hours = { hour: "2-digit", minute: "2-digit", ...(close ? { second: "2-digit" } : {}), hour12: false };
  const shown = days ? { month: "short", day: "numeric" } : hours;
  return marks.map((mark) => new Date(1000 * mark).toLocaleString("en-GB", shown));
}

function options(holder, at, series, format, top) {
  const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line-strong") } };
  return { width: holder.clientWidth, height: 210, series: [{ value: (_, at) => (at ? new Date(1000 * at).toLocaleString("en-GB") : "–") }, ...series], legend: { live: true }, axes: [{ ...axis, values: clock }, { ...axis, size: 64, incrs: [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], values: (_, values) => values.map(format) }], scales: { x: { range: [at[0], at.at(-1)] }, y: { range: (_, low, high) => (top ? [0, top] : [Math.min(0, low), high > 0 ? high * 1.1 : 1]) } } };
}

function plot(holder, data, series, format, top) {
  plots.get(holder)?.destroy();
  plots.delete(holder);
  if (data[0].length === 0) { holder.replaceChildren(element("p", { class: "empty" }, holder.dataset.empty)); return; }
  holder.replaceChildren();
  plots.set(holder, new uPlot(options(holder, data[0], series, format, top), data, holder));
}

async function activity(holder) {
  const { minutes } = await ask("GET", `/admin/v1/activity?minutes=60&model=${encodeURIComponent(holder.dataset.model)}`);
  const found = new Map(minutes.map((row) => [Date.parse(row.at) / 1000, row]));
  const end = Math.floor(Date.now() / 60000) * 60;
  const at = found.size ? Array.from({ length: 60 }, (_, index) => end - 60 * (59 - index)) : [];
  const take = (field) => at.map((time) => found.get(time)?.[field] ?? 0);
  plot(holder, [at, take("requests"), take("failed")], [
    { label: "requests", stroke: colour("--c1"), fill: `${colour("--c1")}33`, width: 1.5, points: { show: false } },
    { label: "failed", stroke: colour("--deliver"), width: 1.5, points: { show: false } },
  ], (value) => (Number.isInteger(value) ? value : ""));
  const share = (met, of) => at.map((time) => { const row = found.get(time); return row?.[of] ? (100 * row[met]) / row[of] : null; });
  const percent = (_, value) => (value === null ? "–" : `${Math.round(value)} %`);
  const line = (label, name) => ({ label, stroke: colour(name), width: 1.5, spanGaps: true, points: { show: true, size: 5 }, value: percent });
  const counted = minutes.some((row) => row.first_tokens);
  plot(document.getElementById("attainment"), [counted ? at : [], share("first_tokens_met", "first_tokens"), share("answers_met", "answers")], [
    line("first token in time", "--c2"), line("tokens in time", "--c1"),
  ], (value) => (value <= 100 ? `${value} %` : ""), 105);
}

async function firstTokens(holder) {
  const { cold_starts: starts } = await ask("GET", `/admin/v1/cold-starts?limit=100&model=${encodeURIComponent(holder.dataset.model)}`);
  const rows = starts.filter((row) => row.ttft_s !== null).reverse();
  const moments = rows.map((row) => Date.parse(row.created_at) / 1000);
  // A margin on both sides, which the line of the target crosses.
  const margin = rows.length ? Math.max(60, (moments.at(-1) - moments[0]) / 30) : 0;
  const at = rows.length ? [moments[0] - margin, ...moments, moments.at(-1) + margin] : [];
  plot(holder, [at, [null, ...rows.map((row) => row.ttft_s), null], at.map(() => Number(holder.dataset.targetS))], [
    { label: "first token", stroke: colour("--c2"), width: 0, points: { show: true, size: 7, fill: colour("--c2") }, value: (_, value) => seconds(value) },
    { label: "target", stroke: colour("--c3"), dash: [6, 4], width: 1.5, points: { show: false }, value: (_, value) => seconds(value) },
  ], (value) => (value === 0 ? "0" : seconds(value)));
}

async function draw() {
  try {
    await Promise.all([activity(document.getElementById("activity")), firstTokens(document.getElementById("ttft"))]);
  } catch (error) {
    toast(error.message, true);
  }
}
draw();
setInterval(draw, 15000);
addEventListener("themechange", draw);
addEventListener("resize", () => { for (const [holder, made] of plots) made.setSize({ width: holder.clientWidth, height: 210 }); });

const verify = document.querySelector("[data-verify]");
verify.addEventListener("click", async () => {
  const text = verify.textContent;
  verify.disabled = true;
  try {
    let found = await ask("POST", `/admin/v1/models/${verify.dataset.verify}/verify`, {});
    while (found.status === "waiting" || found.status === "running") {
      verify.textContent = found.total_bytes ? `Verifying, ${bytes(found.done_bytes)} of ${bytes(found.total_bytes)}` : "Verifying …";
      await new Promise((done) => setTimeout(done, 500));
      found = await ask("GET", `/admin/v1/verifications/${found.verification_id}`);
    }
    const bad = found.status !== "done" || found.difference_count > 0;
    toast(bad ? `Verification: ${found.error || `${found.difference_count} differences: ${found.differences.join(", ")}`}` : "Every byte is what was recorded", bad);
  } catch (error) {
    toast(error.message, true);
  } finally {
    verify.disabled = false;
    verify.textContent = text;
  }
});
