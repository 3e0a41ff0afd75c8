// What happens when the page opens.

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

// The page of a run holds plays; one that compares runs does not.
async function openBrowser() {
  if (!byId("index")) return null;
  const index = await unpack(bytesOf(byId("index").textContent));
  return index.files.length ? new Browser(index, readEmbedded) : null;
}

async function begin() {
  const browser = await openBrowser();
  const showPlays = browser && ((kind, step) => browser.showStep(kind, step));
  for (const svg of document.querySelectorAll("svg[data-hover]")) answering(svg, showPlays);
  if (browser) {
    byId("plays").hidden = false;
    await browser.begin(location.hash);
  }
  root.dataset.ready = "yes";
}

begin();
