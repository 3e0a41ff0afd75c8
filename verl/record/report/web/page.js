// Start of the page: theme, trajectories, charts and live updates.

const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
root.dataset.theme = dark.matches ? "dark" : "light";
dark.addEventListener("change", (event) => { root.dataset.theme = event.matches ? "dark" : "light"; });
byId("theme").addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
});

async function readEmbedded(name) {
  return unpack(decodeBase64(document.querySelector(`[data-trajectories="${name}"]`).textContent));
}

// The index of the trajectories in a page. A page that compares runs has none.
async function readIndex(page) {
  const element = page.getElementById("index");
  return element ? unpack(decodeBase64(element.textContent)) : { files: [] };
}

let browser = null;

async function usePage(page) {
  const index = await readIndex(page);
  if (index.files.length && browser === null) {
    browser = new Browser(index, root.dataset.live ? fetchTrajectories : readEmbedded);
    byId("trajectories").hidden = false;
    await browser.openFromAddress(location.hash);
  } else if (browser !== null) browser.updateIndex(index);
  const showTrajectories = browser && ((kind, step) => browser.showStep(kind, step));
  for (const svg of document.querySelectorAll("#figures svg[data-hover]")) new InteractiveChart(svg, showTrajectories);
}

async function start() {
  await usePage(document);
  root.dataset.ready = Math.round(performance.now()) + " ms";
  if (!root.dataset.live) return;
  follow((page) => {
    replaceFigures(page);
    return usePage(page);
  });
}

start();
