// How numbers are shown; the templates show them alike (templating.py).
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${value.toFixed(unit === 0 || value >= 100 ? 0 : 1)} ${UNITS[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.1) return `${(1000 * value).toFixed(1)} ms`;
  if (value < 1) return `${(1000 * value).toFixed(0)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${value.toFixed(0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(0)} h` : `${(value / 86400).toFixed(0)} days`;
}

export function ago(moment) {
  return moment ? `${seconds(Math.max(0, (Date.now() - Date.parse(moment)) / 1000))} ago` : "–";
}

export function count(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}

export function short(id) {
  const dash = id.indexOf("-");
  if (dash > 0 && id.length - dash > 11) return id.slice(0, dash + 9);
  return id.length <= 20 ? id : id.slice(0, 12);
}
