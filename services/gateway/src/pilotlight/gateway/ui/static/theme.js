// Before anything is drawn: the theme that was chosen, or the system's.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem("pilotlight-theme") ?? "system";
  const apply = () => {
    const theme = chosen() === "system" ? (system.matches ? "dark" : "light") : chosen();
    document.documentElement.dataset.theme = theme;
    const name = document.getElementById("theme-name");
    if (name) name.textContent = chosen();
    dispatchEvent(new CustomEvent("themechange"));
  };
  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme-button")?.addEventListener("click", () => {
      const order = ["system", "light", "dark"];
      localStorage.setItem("pilotlight-theme", order[(order.indexOf(chosen()) + 1) % order.length]);
      apply();
    });
  });
})();
