// A chat with a model: the stream of /v1/chat/completions, with what its comments tell of a cold
// start.
import { element } from "./dom.js";
import { seconds } from "./format.js";
import { headers, toast } from "./page.js";
import { asCurl, asPython } from "./snippets.js";

const at = (id) => document.getElementById(id);
const turns = [];
let stopping = null;

function request(messages) {
  const body = { model: at("model").value, messages, temperature: Number(at("temperature").value), max_tokens: Number.parseInt(at("max-tokens").value, 10), stream: true };
  return { ...body, stream_options: { include_usage: true } };
}

function messages(prompt) {
  const system = at("system").value.trim();
  return [...(system ? [{ role: "system", content: system }] : []), ...turns, ...(prompt ? [{ role: "user", content: prompt }] : [])];
}

function snippets() {
  const body = request(messages(at("prompt").value.trim() || "What is a pilot light?"));
  at("as-curl").textContent = asCurl(location.origin, body);
  at("as-python").textContent = asPython(location.origin, body);
}

function turn(role, text) {
  at("turns-empty").hidden = true;
  const said = element("span", { class: "said" }, text);
  at("turns").append(element("div", { class: `turn ${role}` }, element("span", { class: "who" }, role === "user" ? "you" : at("model").value), said));
  at("turns").scrollTop = at("turns").scrollHeight;
  return said;
}

// What a held request's client is told: ": pilotlight queue=0 phase=fetch progress=0.42 elapsed=1.0s".
function progress(comment) {
  const told = Object.fromEntries([...comment.matchAll(/(\w+)=(\S+)/g)].map((match) => [match[1], match[2]]));
  if (!told.phase) return;
  at("progress").hidden = false;
  at("progress-fill").setAttribute("width", `${100 * Number(told.progress ?? 0)}%`);
  const share = told.progress ? `, ${Math.round(100 * Number(told.progress))} % fetched` : "";
  at("progress-text").textContent = `Cold start: ${told.phase}${share}, ${told.elapsed ?? ""}`;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    yield* blocks;
  }
}

async function answer(body, said, signal) {
  const began = performance.now();
  const found = { text: "", first: null, last: null, tokens: null };
  const reply = await fetch("/ui/chat", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!reply.ok) throw new Error((await reply.json().catch(() => ({}))).error?.message ?? `${reply.status} ${reply.statusText}`);
  links(reply.headers.get("x-trace-id"));
  for await (const block of events(reply.body)) {
    if (block.startsWith(":")) { progress(block); continue; }
    const data = block.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
    if (!data || data === "[DONE]") continue;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices?.[0]?.delta?.content;
    if (piece) {
      found.last = performance.now();
      found.first ??= found.last;
      at("progress").hidden = true;
      found.text += piece;
      said.textContent = found.text;
      at("turns").scrollTop = at("turns").scrollHeight;
    }
    if (event.usage) found.tokens = event.usage.completion_tokens;
    figures(found, began);
  }
  return found.text;
}

function figures(found, began) {
  const now = performance.now();
  at("f-ttft").textContent = found.first === null ? "–" : seconds((found.first - began) / 1000);
  at("f-tokens").textContent = found.tokens ?? "–";
  const span = found.first === null ? 0 : (found.last - found.first) / 1000;
  at("f-rate").textContent = found.tokens > 1 && span > 0 ? ((found.tokens - 1) / span).toFixed(1) : "–";
  at("f-total").textContent = seconds((now - began) / 1000);
}

function links(trace) {
  at("f-links").replaceChildren(...(trace ? [element("a", { href: `/ui/traces/${trace}` }, "Trace of this request")] : []));
}

async function send() {
  const prompt = at("prompt").value.trim();
  if (!prompt || stopping || !at("model").value) return;
  const body = request(messages(prompt));
  at("prompt").value = "";
  turn("user", prompt);
  const said = turn("assistant", "…");
  stopping = new AbortController();
  at("send").hidden = true;
  at("stop").hidden = false;
  let text = "";
  try {
    text = await answer(body, said, stopping.signal);
    turns.push({ role: "user", content: prompt }, { role: "assistant", content: text });
  } catch (error) {
    if (error.name === "AbortError") said.textContent += " (stopped)";
    else { said.textContent = error.message; said.parentElement.classList.add("error"); }
  } finally {
    stopping = null;
    at("progress").hidden = true;
    at("send").hidden = false;
    at("stop").hidden = true;
    at("prompt").focus();
    snippets();
  }
}

at("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
at("stop").addEventListener("click", () => stopping?.abort());
at("clear").addEventListener("click", () => {
  turns.length = 0;
  at("turns").replaceChildren(at("turns-empty"));
  at("turns-empty").hidden = false;
  snippets();
});
for (const id of ["model", "system", "temperature", "max-tokens", "prompt"]) at(id).addEventListener("input", snippets);
for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(at(button.dataset.copy).textContent);
      toast("Copied");
    } catch {
      toast("The browser does not let this page copy", true);
    }
  });
}
snippets();
