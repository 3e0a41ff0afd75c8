// A page that a server hands out follows its run: it asks for the state of the run, and where that is
// another one for the page again, of which it takes what is new.

const EVERY_MS = 2000;

async function readServed(name) {
  const answer = await fetch("plays/" + encodeURIComponent(name));
  if (!answer.ok) throw new Error(`plays ${name}: ${answer.status}`);
  return unpack(new Uint8Array(await answer.arrayBuffer()));
}

// The state of the run; null where nobody answers.
async function servedStamp() {
  try {
    const answer = await fetch("stamp", { cache: "no-store" });
    return answer.ok ? await answer.text() : null;
  } catch {
    return null;
  }
}

async function servedPage() {
  const answer = await fetch("./", { cache: "no-store" });
  if (!answer.ok) throw new Error(`page: ${answer.status}`);
  return new DOMParser().parseFromString(await answer.text(), "text/html");
}

// Head and figures of another state of the run; the scripts of that page do not come along.
function takeFigures(page) {
  for (const name of ["head", "figures"]) byId(name).replaceChildren(...page.getElementById(name).childNodes);
}

async function follow(takePage) {
  let shown = root.dataset.live;
  for (;;) {
    await new Promise((done) => setTimeout(done, EVERY_MS));
    const stamp = await servedStamp();
    byId("live").textContent = stamp === null ? "the server has gone; this page stays as it is" : "live";
    // A chart with the keyboard on it is left alone until the keyboard goes on.
    if (stamp === null || stamp === shown || document.activeElement.closest("#figures")) continue;
    await takePage(await servedPage());
    shown = stamp;
  }
}
