// One trajectory, turn by turn. The colour of a token shows one of its values (see OVERLAYS).

const OVERLAYS = {
  advantage: { label: "advantage", signed: true, low: "made less likely", high: "made more likely" },
  entropy: { label: "entropy, nats", high: "the policy was unsure" },
  gap: { label: "log-prob, engine minus trainer", signed: true, low: "lower in the engine", high: "higher in the engine" },
  mask: { label: "weight in the loss", masks: true, low: "not in the loss" },
};

function badge(number) {
  return make("span", { className: "badge c-ramp-" + number, textContent: number });
}

function flag(text, tone = "") {
  return make("span", { className: ("flag " + tone).trim(), textContent: text });
}

function outcome(won) {
  return make("span", { className: "outcome " + (won ? "won" : "lost"), textContent: won ? "success" : "failure" });
}

function signedNumber(value, digits) {
  return (value < 0 ? "" : "+") + value.toFixed(digits);
}

// The names of the overlays for which at least one turn has values.
function overlaysOf(plays) {
  const steps = plays.flatMap((play) => play.steps);
  return Object.keys(OVERLAYS).filter((name) => steps.some((step) => step.overlays?.[name]));
}

function scaleOf(plays, name) {
  const values = plays.flatMap((play) => play.steps).flatMap((step) => step.overlays?.[name] ?? []);
  return fullSize(values.filter((value) => value !== null));
}

function tokenClass(value, overlay) {
  if (overlay.masks) return value === 0 ? "masked" : "";
  if (!overlay.signed) return "heat";
  return value < 0 ? "down" : "up";
}

function tokenSpan(text, value, overlay, scale) {
  const span = make("span", { textContent: text });
  if (value === undefined || value === null) return span;
  const sign = overlay.signed && value >= 0 ? "+" : "";
  span.title = overlay.label + " " + sign + shortNumber(value);
  span.className = tokenClass(value, overlay);
  span.style.setProperty("--s", Math.min(1, Math.abs(value) / scale).toFixed(2));
  return span;
}

function response(step, name, scale) {
  const words = make("p", { className: "response" });
  if (!step.tokens) {
    words.textContent = step.response ?? "";
    return words;
  }
  const values = step.overlays?.[name] ?? [];
  words.append(...step.tokens.map((text, place) => tokenSpan(text, values[place], OVERLAYS[name], scale)));
  return words;
}

function actionLine(step) {
  const line = make("p", { className: "action" });
  line.append(...(step.badges ?? []).map(badge), make("b", { textContent: step.action ?? "" }));
  if (step.invalid) line.append(flag("not valid"));
  if (step.cut) line.append(flag("truncated"));
  line.append(...(step.flags ?? []).map((text) => flag(text)));
  if (step.reward) line.append(flag("reward " + shortNumber(step.reward), "good"));
  if (step.advantage !== undefined && step.tokens) {
    line.append(make("span", { className: "quiet", textContent: "advantage " + signedNumber(step.advantage, 2) }));
  }
  return line;
}

function alternatives(table) {
  const heads = table.heads.map((text, place) => make("th", { textContent: text, title: table.hints[place] }));
  const body = make("tbody");
  for (const line of table.lines) {
    const text = make("td", { textContent: line.text || "—" });
    if (line.chosen) text.append(" ", flag("sampled", "own"));
    const cells = line.cells.map(([value, best]) => make("td", { className: best ? "num best" : "num", textContent: value }));
    body.append(make("tr", {}, make("td", {}, badge(line.number)), text, ...cells));
  }
  const found = make("table", { className: "alternatives" }, make("thead", {}, make("tr", {}, ...heads)), body);
  if (table.note) {
    const note = make("td", { colSpan: table.heads.length - 1, textContent: table.note });
    found.append(make("tfoot", {}, make("tr", {}, make("td"), note)));
  }
  return make("div", { className: "wide" }, found);
}

function said(step, name, scale) {
  const observation = make("p", { className: "observation", textContent: step.observation ?? "" });
  const parts = make("div", { className: "said" }, observation, actionLine(step), response(step, name, scale));
  if (step.summary) parts.append(make("p", { className: "action" }, flag("summary")), response(step.summary, name, scale));
  return parts;
}

function turn(step, name, scale) {
  const parts = said(step, name, scale);
  parts.append(...(step.tables ?? []).map(alternatives));
  return make("li", { className: "turn" }, make("div", { className: "count", textContent: step.step + 1 }), parts);
}

function turns(play, name) {
  const scale = scaleOf([play], name);
  return make("ol", { className: "turns" }, ...play.steps.map((step) => turn(step, name, scale)));
}

// Legend of the token colours, with a menu of overlays if there are several.
function overlayChoice(names, chosen, choose) {
  const line = make("p", { className: "overlays" });
  if (!names.length) return line;
  if (names.length > 1) {
    const select = make("select", {}, ...names.map((name) => new Option(OVERLAYS[name].label, name, false, name === chosen)));
    select.addEventListener("change", () => choose(select.value));
    line.append(make("label", {}, "colour of tokens ", select), " ");
  }
  const overlay = OVERLAYS[chosen];
  const sample = (text, className) => {
    const span = make("span", { className, textContent: text });
    span.style.setProperty("--s", "0.9");
    return span;
  };
  const words = make("span", { className: "response" });
  if (overlay.low) words.append(sample(overlay.low, tokenClass(overlay.masks ? 0 : -1, overlay)), " ");
  if (overlay.high) words.append(sample(overlay.high, tokenClass(1, overlay)));
  line.append(words);
  return line;
}
