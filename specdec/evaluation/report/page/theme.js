"use strict";
// The theme is the system's until the button is pressed; a page that may keep it does.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (prefersDark.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.setAttribute("aria-pressed", String(isDark()));
  };
  try {
    const kept = localStorage.getItem("specdec-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch {
    // storage is denied to some local files
  }
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("specdec-theme", root.dataset.theme);
    } catch {
      // as above: the choice lasts as long as the page
    }
    show();
  });
  prefersDark.addEventListener("change", show);
  show();
  // what is folded is printed too
  addEventListener("beforeprint", () => {
    for (const one of document.querySelectorAll("details")) one.open = true;
  });
})();
