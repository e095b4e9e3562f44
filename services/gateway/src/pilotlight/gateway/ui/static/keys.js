// Makes keys: the key itself is in one dialog, once.
const make = document.getElementById("make");
const made = document.getElementById("made");
const shown = document.getElementById("made-key");

document.getElementById("make-open")?.addEventListener("click", () => make.showModal());

document.body.addEventListener("changed", ({ detail }) => {
  if (!detail?.key) return;
  make.querySelector("form").reset();
  make.close();
  shown.value = detail.key;
  made.showModal();
  shown.select();
});

made?.addEventListener("close", () => { shown.value = ""; });
