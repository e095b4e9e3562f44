import { element, pill } from "./dom.js";
import { ago, count, seconds, short } from "./format.js";
import { List } from "./list.js";
import { follow } from "./stream.js";

const age = (row) => -Date.parse(row.created_at);
const list = new List(document.getElementById("starts"), {
  label: "Cold starts",
  key: (row) => row.key,
  sort: 0,
  columns: [
    { title: "When", width: "15%", value: age, cell: (row) => element("a", { href: `/ui/cold-starts/${row.key}` }, ago(row.created_at)) },
    { title: "Model", width: "28%", value: (row) => row.model, cell: (row) => element("a", { href: `/ui/models/${row.model}` }, row.model) },
    { title: "State", width: "13%", value: (row) => row.status, cell: (row) => pill(row.status === "open" ? "starting" : row.status) },
    { title: "First token", width: "14%", number: true, value: (row) => row.ttft_s ?? -1, cell: (row) => seconds(row.ttft_s) },
    { title: "Explained", width: "12%", number: true, value: (row) => row.coverage ?? -1, cell: (row) => (row.coverage === null ? "–" : `${Math.round(100 * row.coverage)} %`) },
    { title: "Instance", width: "18%", value: (row) => row.key, cell: (row) => element("code", {}, short(row.key)) },
  ],
});

const find = document.getElementById("starts-find");
let known = [];
const draw = () => {
  const text = find.value.trim().toLowerCase();
  const rows = known.filter((row) => row.model.toLowerCase().includes(text));
  document.getElementById("starts-count").textContent = count(rows.length);
  list.show(rows);
};
find.addEventListener("input", draw);
follow(["cold_starts"], (_, rows) => { known = [...rows.values()]; draw(); });
