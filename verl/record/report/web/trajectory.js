// One trajectory, turn by turn. The colour of a token shows one of its values (see OVERLAYS).

const OVERLAYS = {
  advantage: { label: "advantage", signed: true, low: "made less likely", high: "made more likely" },
  entropy: { label: "entropy, nats", high: "the policy was unsure" },
  gap: { label: "log-prob, engine minus trainer", signed: true, low: "lower in the engine", high: "higher in the engine" },
  mask: { label: "weight in the loss", masks: true, low: "not in the loss" },
};

function makeBadge(number) {
  return createElement("span", { className: "badge c-ramp-" + number, textContent: number });
}

function makeFlag(text, tone = "") {
  return createElement("span", { className: ("flag " + tone).trim(), textContent: text });
}

function makeOutcome(won) {
  return createElement("span", { className: "outcome " + (won ? "won" : "lost"), textContent: won ? "success" : "failure" });
}

function signedNumber(value, digits) {
  return (value < 0 ? "" : "+") + value.toFixed(digits);
}

// The names of the overlays for which at least one turn has values.
function listOverlays(trajectories) {
  const steps = trajectories.flatMap((trajectory) => trajectory.steps);
  return Object.keys(OVERLAYS).filter((name) => steps.some((step) => step.overlays?.[name]));
}

function measureScale(trajectories, name) {
  const values = trajectories.flatMap((trajectory) => trajectory.steps).flatMap((step) => step.overlays?.[name] ?? []);
  return computeScale(values.filter((value) => value !== null));
}

function tokenClass(value, overlay) {
  if (overlay.masks) return value === 0 ? "masked" : "";
  if (!overlay.signed) return "heat";
  return value < 0 ? "down" : "up";
}

function makeTokenSpan(text, value, overlay, scale) {
  const span = createElement("span", { textContent: text });
  if (value === undefined || value === null) return span;
  const sign = overlay.signed && value >= 0 ? "+" : "";
  span.title = overlay.label + " " + sign + shortNumber(value);
  span.className = tokenClass(value, overlay);
  span.style.setProperty("--s", Math.min(1, Math.abs(value) / scale).toFixed(2));
  return span;
}

function makeResponse(step, name, scale) {
  const words = createElement("p", { className: "response" });
  if (!step.tokens) {
    words.textContent = step.response ?? "";
    return words;
  }
  const values = step.overlays?.[name] ?? [];
  words.append(...step.tokens.map((text, position) => makeTokenSpan(text, values[position], OVERLAYS[name], scale)));
  return words;
}

function makeActionLine(step) {
  const line = createElement("p", { className: "action" });
  line.append(...(step.badges ?? []).map(makeBadge), createElement("b", { textContent: step.action ?? "" }));
  if (step.invalid) line.append(makeFlag("not valid"));
  if (step.cut) line.append(makeFlag("truncated"));
  line.append(...(step.flags ?? []).map((text) => makeFlag(text)));
  if (step.reward) line.append(makeFlag("reward " + shortNumber(step.reward), "good"));
  if (step.advantage !== undefined && step.tokens) {
    line.append(createElement("span", { className: "quiet", textContent: "advantage " + signedNumber(step.advantage, 2) }));
  }
  return line;
}

function makeAlternatives(table) {
  const heads = table.heads.map((text, position) => createElement("th", { textContent: text, title: table.hints[position] }));
  const body = createElement("tbody");
  for (const line of table.lines) {
    const text = createElement("td", { textContent: line.text || "—" });
    if (line.chosen) text.append(" ", makeFlag("sampled", "own"));
    const cells = line.cells.map(([value, best]) => createElement("td", { className: best ? "num best" : "num", textContent: value }));
    body.append(createElement("tr", {}, createElement("td", {}, makeBadge(line.number)), text, ...cells));
  }
  const element = createElement("table", { className: "alternatives" }, createElement("thead", {}, createElement("tr", {}, ...heads)), body);
  if (table.note) {
    const note = createElement("td", { colSpan: table.heads.length - 1, textContent: table.note });
    element.append(createElement("tfoot", {}, createElement("tr", {}, createElement("td"), note)));
  }
  return createElement("div", { className: "wide" }, element);
}

function makeTurnContent(step, name, scale) {
  const observation = createElement("p", { className: "observation", textContent: step.observation ?? "" });
  const parts = createElement("div", { className: "turn-content" }, observation, makeActionLine(step), makeResponse(step, name, scale));
  if (step.summary) parts.append(createElement("p", { className: "action" }, makeFlag("summary")), makeResponse(step.summary, name, scale));
  return parts;
}

function makeTurn(step, name, scale) {
  const parts = makeTurnContent(step, name, scale);
  parts.append(...(step.tables ?? []).map(makeAlternatives));
  return createElement("li", { className: "turn" }, createElement("div", { className: "count", textContent: step.step + 1 }), parts);
}

function listTurns(trajectory, name) {
  const scale = measureScale([trajectory], name);
  return createElement("ol", { className: "turns" }, ...trajectory.steps.map((step) => makeTurn(step, name, scale)));
}

// Legend of the token colours, with a menu of overlays if there are several.
function makeOverlayMenu(names, chosen, choose) {
  const line = createElement("p", { className: "overlays" });
  if (!names.length) return line;
  if (names.length > 1) {
    const select = createElement("select", {}, ...names.map((name) => new Option(OVERLAYS[name].label, name, false, name === chosen)));
    select.addEventListener("change", () => choose(select.value));
    line.append(createElement("label", {}, "colour of tokens ", select), " ");
  }
  const overlay = OVERLAYS[chosen];
  const sample = (text, className) => {
    const span = createElement("span", { className, textContent: text });
    span.style.setProperty("--s", "0.9");
    return span;
  };
  const words = createElement("span", { className: "response" });
  if (overlay.low) words.append(sample(overlay.low, tokenClass(overlay.masks ? 0 : -1, overlay)), " ");
  if (overlay.high) words.append(sample(overlay.high, tokenClass(1, overlay)));
  line.append(words);
  return line;
}
