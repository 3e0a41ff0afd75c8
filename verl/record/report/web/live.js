// Updates of a page that a server delivers during a run. The page polls a stamp of the run's state.
// When the stamp changes, it loads the page again and replaces its own head and figures.

const EVERY_MS = 2000;

async function fetchTrajectories(name) {
  const answer = await fetch("trajectories/" + encodeURIComponent(name));
  if (!answer.ok) throw new Error(`trajectories ${name}: ${answer.status}`);
  return unpack(new Uint8Array(await answer.arrayBuffer()));
}

async function fetchText(name) {
  const answer = await fetch(name, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.text();
}

// Replace head and figures by those of `page`. Its scripts are not taken over.
function replaceFigures(page) {
  for (const name of ["head", "figures"]) byId(name).replaceChildren(...page.getElementById(name).childNodes);
}

async function follow(usePage) {
  let shown = root.dataset.live;
  for (;;) {
    await new Promise((done) => setTimeout(done, EVERY_MS));
    // Do not replace the figures while one of them has the keyboard focus.
    if (document.activeElement.closest("#figures")) continue;
    try {
      const stamp = await fetchText("stamp");
      if (stamp !== shown) {
        await usePage(new DOMParser().parseFromString(await fetchText("./"), "text/html"));
        shown = stamp;
      }
      byId("live").textContent = "live";
    } catch (error) {
      byId("live").textContent = `not live: this page is no longer updated (${error.message})`;
    }
  }
}
