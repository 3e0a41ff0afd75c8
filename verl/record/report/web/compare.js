// The trajectories of a group side by side, turn by turn. A mark shows where each first differs from
// the first one.

// The first turn in which the actions or observations of two trajectories differ, or that only one
// of them has. null if all turns are the same. Thoughts are not compared.
function partingTurn(one, other) {
  const length = Math.max(one.steps.length, other.steps.length);
  for (let place = 0; place < length; place += 1) {
    const [first, second] = [one.steps[place], other.steps[place]];
    if (!first || !second) return place;
    if (first.action !== second.action || first.observation !== second.observation) return place;
  }
  return null;
}

// The members of a group: the reference, then those with another outcome, then all others.
function besides(members, reference) {
  const others = members.filter((row) => row.number !== reference.number);
  const differs = (row) => (row.won === reference.won ? 1 : 0);
  return [reference, ...others.sort((one, other) => differs(one) - differs(other) || one.number - other.number)];
}

function columnHead(row, parting, choose) {
  const words = `return ${shortNumber(row.earned)} · ${plural(row.turns, "turn")}`;
  const head = make("th", { scope: "col" }, outcome(row.won), " ", make("span", { className: "quiet", textContent: words }));
  const line = make("p", { className: "quiet" });
  if (choose) {
    const button = make("button", { textContent: "put first" });
    button.addEventListener("click", choose);
    line.append(parting === null ? "the same in all turns " : `differs from turn ${parting + 1} `, button);
  } else {
    line.append("the others are compared with this one");
  }
  head.append(line);
  return head;
}

function comparison(rows, plays, name, choose) {
  const partings = plays.map((play) => partingTurn(plays[0], play));
  const scale = scaleOf(plays, name);
  const heads = rows.map((row, place) => columnHead(row, partings[place], place ? () => choose(row) : null));
  const body = make("tbody");
  const length = Math.max(...plays.map((play) => play.steps.length));
  for (let place = 0; place < length; place += 1) {
    const cells = plays.map((play, column) => cell(play.steps[place], column && partings[column] === place, name, scale));
    body.append(make("tr", {}, make("th", { scope: "row", textContent: place + 1 }), ...cells));
  }
  const table = make("table", { className: "besides" }, make("thead", {}, make("tr", {}, make("th"), ...heads)), body);
  return make("div", { className: "wide", tabIndex: 0 }, table);
}

function cell(step, parts, name, scale) {
  const found = make("td", { className: parts ? "parts" : "" });
  if (parts) found.append(make("p", { className: "mark", textContent: "differs here" }));
  if (step) found.append(said(step, name, scale));
  else if (parts) found.append(make("p", { className: "quiet", textContent: "already ended" }));
  return found;
}
