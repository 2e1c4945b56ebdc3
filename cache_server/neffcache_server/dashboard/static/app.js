// What pages do beyond links and forms: the theme switch, ticking clocks, and live parts.
(() => {
  "use strict";
  const root = document.documentElement;

  const themeSwitch = document.querySelector("[data-theme-switch]");
  if (themeSwitch) {
    themeSwitch.hidden = false;
    themeSwitch.addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      localStorage.setItem("neffcache-theme", root.dataset.theme);
    });
  }

  for (const select of document.querySelectorAll("[data-submit]")) {
    select.addEventListener("change", () => {
      // On a job's or graph's page the namespace is part of the subject: go to the view instead.
      const view = document.querySelector('nav[aria-label="Views"] [aria-current]');
      const url = new URL(view ? view.href : "/", location.href);
      url.search = "";
      if (select.value) url.searchParams.set("namespace", select.value);
      location.assign(url);
    });
  }

  const words = (seconds) => {
    if (seconds < 100) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds);
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
    return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  };
  let drawn = performance.now();
  setInterval(() => {
    const passed = (performance.now() - drawn) / 1000;
    for (const cell of document.querySelectorAll("[data-tick]")) {
      cell.textContent = words(Number(cell.dataset.tick) + passed);
    }
  }, 1000);

  const feed = document.body.dataset.feed;
  if (!feed) return;
  const state = document.querySelector("[data-feed-state]");
  const say = (text, good) => {
    if (state.textContent !== text) state.textContent = text;
    state.classList.toggle("on", good);
  };

  // The server draws: on a change the page is fetched again and its live parts are exchanged.
  let wanted = false;
  let fetching = false;
  const refresh = async () => {
    wanted = true;
    if (fetching) return;
    fetching = true;
    try {
      while (wanted) {
        wanted = false;
        const answer = await fetch(location.href, { headers: { accept: "text/html" } });
        if (!answer.ok) throw new Error(String(answer.status));
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of document.querySelectorAll("[data-live]")) {
          const other = fresh.getElementById(part.id);
          // Somebody who reads a log or is about to follow a link is not interrupted.
          if (other && !part.contains(document.activeElement) && !part.querySelector("details[open]")) {
            part.replaceChildren(...other.childNodes);
          }
        }
        drawn = performance.now();
        say("live", true);
      }
    } catch {
      say("the server does not answer; trying again", false);
    } finally {
      fetching = false;
    }
  };

  const source = new EventSource(feed);
  source.addEventListener("open", () => say("live", true));
  source.addEventListener("live", refresh);
  source.addEventListener("trouble", () => say("the server's database does not answer; trying again", false));
  source.addEventListener("error", () => say("connection lost; trying again", false));
  addEventListener("pagehide", () => source.close());
})();
