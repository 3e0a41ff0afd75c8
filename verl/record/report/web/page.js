// Start of the page: theme, trajectories, charts and live updates.

const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
root.dataset.theme = dark.matches ? "dark" : "light";
dark.addEventListener("change", (event) => { root.dataset.theme = event.matches ? "dark" : "light"; });
byId("theme").addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
});

async function readEmbedded(name) {
  return unpack(bytesOf(document.querySelector(`[data-plays="${name}"]`).textContent));
}

// The index of the trajectories in a page. A page that compares runs has none.
async function indexOf(page) {
  const element = page.getElementById("index");
  return element ? unpack(bytesOf(element.textContent)) : { files: [] };
}

let browser = null;

async function take(page) {
  const index = await indexOf(page);
  if (index.files.length && browser === null) {
    browser = new Browser(index, root.dataset.live ? readServed : readEmbedded);
    byId("plays").hidden = false;
    await browser.begin(location.hash);
  } else if (browser !== null) browser.renew(index);
  const showPlays = browser && ((kind, step) => browser.showStep(kind, step));
  for (const svg of document.querySelectorAll("#figures svg[data-hover]")) new Answering(svg, showPlays);
}

async function begin() {
  await take(document);
  root.dataset.ready = Math.round(performance.now()) + " ms";
  if (!root.dataset.live) return;
  follow((page) => {
    takeFigures(page);
    return take(page);
  });
}

begin();
