// What every page does: forms and buttons that change something, by the admin API.
import { element } from "./dom.js";

const token = document.querySelector("meta[name=csrf-token]")?.content ?? "";

export function toast(text, bad = false) {
  const shown = element("div", { class: bad ? "toast bad" : "toast" }, text);
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), bad ? 12000 : 5000);
}

export function headers() {
  return { "content-type": "application/json", "x-csrf-token": token };
}

// Ask the admin API; an error is thrown with what it says.
export async function ask(method, url, body) {
  const answer = await fetch(url, { method, headers: headers(), body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.status === 401) { location.assign(`/ui/sign-in?next=${encodeURIComponent(location.pathname.slice(3))}`); }
  const text = await answer.text();
  const read = text ? JSON.parse(text) : {};
  if (!answer.ok) throw new Error(`${read.error?.message ?? answer.statusText}. ${read.error?.what_to_do ?? ""}`);
  return read;
}

export async function act(source, body) {
  const { action, url, confirm: question, done, go } = source.dataset;
  if (question && !confirm(question)) return;
  const buttons = source.matches("button") ? [source] : source.querySelectorAll("button");
  for (const button of buttons) button.disabled = true;
  try {
    const answer = await ask(action, url, body);
    if (go) { location.assign(go.replace("{name}", answer.name ?? "")); return; }
    toast(done);
    document.body.dispatchEvent(new CustomEvent("changed", { detail: answer }));
    return answer;
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

// Fields that are no strings, by their `data-kind`.
const READ = {
  int: (text) => Number.parseInt(text, 10),
  float: Number,
  words: (text) => text.split(/[\s,]+/).filter(Boolean),
  moment: (text) => new Date(text).toISOString(),
};

// A form's fields as JSON: `slo.ttft_ms` is a field of `slo`, empty ones are left out.
function bodyOf(form) {
  const body = {};
  for (const input of form.elements) {
    if (!input.name || input.value === "") continue;
    const path = input.name.split(".");
    const last = path.pop();
    const into = path.reduce((object, name) => (object[name] ??= {}), body);
    into[last] = READ[input.dataset.kind]?.(input.value) ?? input.value;
  }
  return body;
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!form.dataset.action) return;
  event.preventDefault();
  const alert = form.querySelector("[role=alert]");
  alert.hidden = true;
  try {
    await act(form, bodyOf(form));
  } catch (error) {
    alert.textContent = error.message;
    alert.hidden = false;
  }
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("button");
  if (!button) return;
  if (button.dataset.close !== undefined) button.closest("dialog").close();
  if (!button.dataset.action) return;
  const body = button.dataset.body ? JSON.parse(button.dataset.body) : undefined;
  try { await act(button, body); } catch (error) { toast(error.message, true); }
});
