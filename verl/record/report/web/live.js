// A page that a server hands out follows its run: it asks for the state of the run, and where that is
// another one for the page again, of which it takes what is new.

const EVERY_MS = 2000;

async function readServed(name) {
  const answer = await fetch("plays/" + encodeURIComponent(name));
  if (!answer.ok) throw new Error(`plays ${name}: ${answer.status}`);
  return unpack(new Uint8Array(await answer.arrayBuffer()));
}

async function servedText(name) {
  const answer = await fetch(name, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.text();
}

// Head and figures of another state of the run; the scripts of that page do not come along.
function takeFigures(page) {
  for (const name of ["head", "figures"]) byId(name).replaceChildren(...page.getElementById(name).childNodes);
}

async function follow(takePage) {
  let shown = root.dataset.live;
  for (;;) {
    await new Promise((done) => setTimeout(done, EVERY_MS));
    // A chart with the keyboard on it is left alone until the keyboard goes on.
    if (document.activeElement.closest("#figures")) continue;
    try {
      const stamp = await servedText("stamp");
      if (stamp !== shown) {
        await takePage(new DOMParser().parseFromString(await servedText("./"), "text/html"));
        shown = stamp;
      }
      byId("live").textContent = "live";
    } catch (error) {
      byId("live").textContent = `not live, this page stays as it is (${error.message})`;
    }
  }
}
