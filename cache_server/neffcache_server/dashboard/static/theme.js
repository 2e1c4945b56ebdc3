// Before the first paint: the theme that this browser chose last.
(() => {
  const chosen = localStorage.getItem("neffcache-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
