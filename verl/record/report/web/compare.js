// The trajectories of a group side by side, turn by turn. A mark shows where each first differs from
// the first one.

// The first turn in which the actions or observations of two trajectories differ, or that only one
// of them has. null if all turns are the same. Thoughts are not compared.
function firstDifference(one, other) {
  const length = Math.max(one.steps.length, other.steps.length);
  for (let position = 0; position < length; position += 1) {
    const [first, second] = [one.steps[position], other.steps[position]];
    if (!first || !second) return position;
    if (first.action !== second.action || first.observation !== second.observation) return position;
  }
  return null;
}

// The members of a group: the reference, then those with another outcome, then all others.
function orderMembers(members, reference) {
  const others = members.filter((row) => row.number !== reference.number);
  const differs = (row) => (row.won === reference.won ? 1 : 0);
  return [reference, ...others.sort((one, other) => differs(one) - differs(other) || one.number - other.number)];
}

function makeColumnHead(row, difference, choose) {
  const words = `return ${shortNumber(row.return)} · ${plural(row.turns, "turn")}`;
  const head = createElement("th", { scope: "col" }, makeOutcome(row.won), " ", createElement("span", { className: "quiet", textContent: words }));
  const line = createElement("p", { className: "quiet" });
  if (choose) {
    const button = createElement("button", { textContent: "put first" });
    button.addEventListener("click", choose);
    line.append(difference === null ? "the same in all turns " : `differs from turn ${difference + 1} `, button);
  } else {
    line.append("the others are compared with this one");
  }
  head.append(line);
  return head;
}

function compareTrajectories(rows, trajectories, name, choose) {
  const differences = trajectories.map((trajectory) => firstDifference(trajectories[0], trajectory));
  const scale = measureScale(trajectories, name);
  const heads = rows.map((row, position) => makeColumnHead(row, differences[position], position ? () => choose(row) : null));
  const body = createElement("tbody");
  const length = Math.max(...trajectories.map((trajectory) => trajectory.steps.length));
  for (let position = 0; position < length; position += 1) {
    const cells = trajectories.map((trajectory, column) => makeCell(trajectory.steps[position], column && differences[column] === position, name, scale));
    body.append(createElement("tr", {}, createElement("th", { scope: "row", textContent: position + 1 }), ...cells));
  }
  const table = createElement("table", { className: "side-by-side" }, createElement("thead", {}, createElement("tr", {}, createElement("th"), ...heads)), body);
  return createElement("div", { className: "wide", tabIndex: 0 }, table);
}

function makeCell(step, differs, name, scale) {
  const cell = createElement("td", { className: differs ? "differs" : "" });
  if (differs) cell.append(createElement("p", { className: "mark", textContent: "differs here" }));
  if (step) cell.append(makeTurnContent(step, name, scale));
  else if (differs) cell.append(createElement("p", { className: "quiet", textContent: "already ended" }));
  return cell;
}
