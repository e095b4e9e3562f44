// One stream of server-sent events for a page: rows by topic, and who draws them.

const state = document.getElementById("live-state");

function show(name, text) {
  if (!state || state.dataset.state === name) return;
  state.dataset.state = name;
  state.textContent = text;
}

// Follow topics; draw(topic, rows) is called at most once a frame, with all rows by key.
export function follow(topics, draw) {
  const tables = new Map(topics.map((topic) => [topic, new Map()]));
  const changed = new Set();
  let asked = false;
  let parsing = 0;
  const redraw = () => {
    asked = false;
    const start = performance.now();
    for (const topic of changed) draw(topic, tables.get(topic));
    changed.clear();
    // How long parsing and drawing took: browsers show it, and a test bounds it. The last one is kept.
    performance.clearMeasures("update");
    performance.measure("update", { start: start - parsing, end: performance.now() });
    parsing = 0;
    document.body.dataset.updates = Number(document.body.dataset.updates ?? 0) + 1;
  };
  const query = topics.map((topic) => `topic=${topic}`).join("&");
  let source = null;
  const open = () => {
    source = new EventSource(`/admin/v1/stream?${query}`);
    source.onopen = () => show("live", "Live");
    source.onmessage = (message) => {
      const start = performance.now();
      const event = JSON.parse(message.data);
      const rows = tables.get(event.topic);
      if (event.reset) rows.clear();
      for (const row of event.rows) rows.set(row.key, row);
      for (const key of event.gone) rows.delete(key);
      changed.add(event.topic);
      parsing += performance.now() - start;
      if (!event.more && !asked) { asked = true; requestAnimationFrame(redraw); }
    };
    source.onerror = () => {
      show("lost", "Reconnecting …");
      // A refusal closes for good: a busy gateway is asked again, and one that forgot the session
      // shows so when the page is loaded.
      if (source.readyState === EventSource.CLOSED) setTimeout(look, 5000);
    };
  };
  // A browser has few connections to a host: a page that is not looked at leaves its own to others.
  const look = () => {
    source?.close();
    if (!document.hidden) open();
  };
  look();
  document.addEventListener("visibilitychange", look);
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) look(); });
}
