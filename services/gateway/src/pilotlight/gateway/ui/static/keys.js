// Makes keys, puts new ones in their place, and limits them: a key itself is in one dialog, once.
const dialog = (id) => document.getElementById(id);
const [make, limits, rotate, made] = ["make", "limits", "rotate", "made"].map(dialog);
const shown = document.getElementById("made-key");

dialog("make-open")?.addEventListener("click", () => make.showModal());

// The dialog is one for all keys: it is told which key is meant.
function open(asked, button, path, values = {}) {
  const form = asked.querySelector("form");
  form.reset();
  form.dataset.url = `/admin/v1/keys/${button.dataset.key}/${path}`;
  form.querySelector("[role=alert]").hidden = true;
  asked.querySelector("[data-of]").textContent = button.dataset.label;
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value ?? "";
  asked.showModal();
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest?.("button[data-key]");
  if (!button) return;
  if (button.dataset.limits) open(limits, button, "limits", JSON.parse(button.dataset.limits));
  else if (button.dataset.rotate !== undefined) open(rotate, button, "rotate");
});

document.body.addEventListener("changed", ({ detail }) => {
  for (const asked of [make, limits, rotate]) {
    if (asked?.open) { asked.close(); asked.querySelector("form").reset(); }
  }
  if (!detail?.key) return;
  shown.value = detail.key;
  made.showModal();
  shown.select();
});

made?.addEventListener("close", () => { shown.value = ""; });
