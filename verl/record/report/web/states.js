// State graph of a group: states as nodes, actions as edges, coloured by the credit of the action.

const MAX_STATES = 60;
const STATE = { wide: 150, high: 34, across: 250, down: 62, margin: 24, apart: 24 };

function stateOf(step) {
  return step.state ?? step.observation ?? "";
}

// Return nodes { text, depth, count } and edges { from, to, action, rows, credit }. The depth of a node
// is the earliest turn in which its state occurs. Success, failure and "later turns" are separate end
// nodes. With more than `max` states, later turns are not drawn.
function buildStateGraph(rows, trajectories, max = MAX_STATES) {
  const length = Math.max(0, ...trajectories.map((trajectory) => trajectory.steps.length));
  let turns = length;
  const statesOf = (count) => new Set(trajectories.flatMap((trajectory) => trajectory.steps.slice(0, count).map(stateOf)));
  while (turns > 1 && statesOf(turns).size > max) turns -= 1;
  const nodes = new Map();
  const edges = new Map();
  const visit = (text, depth, end) => {
    const name = (end ? "end " : "state ") + text;
    const node = nodes.get(name) ?? { name, text, depth, end, count: 0 };
    node.depth = Math.min(node.depth, depth);
    node.count += 1;
    nodes.set(name, node);
    return name;
  };
  trajectories.forEach((trajectory, which) => {
    const steps = trajectory.steps.slice(0, turns);
    const cut = trajectory.steps.length > turns;
    const names = steps.map((step, depth) => visit(stateOf(step), depth, false));
    names.push(visit(cut ? "later turns" : rows[which].won ? "success" : "failure", turns, true));
    steps.forEach((step, position) => {
      const name = JSON.stringify([names[position], step.action ?? "", names[position + 1]]);
      const edge = edges.get(name) ?? { from: names[position], to: names[position + 1], action: step.action ?? "", rows: [], credits: [] };
      edge.rows.push(rows[which]);
      edge.credits.push(step.advantage ?? null);
      edges.set(name, edge);
    });
  });
  const edgeList = [...edges.values()];
  const measured = setCredits(edgeList, rows);
  return { nodes: [...nodes.values()], edges: edgeList, turns, cut: turns < length, measured };
}

// Set the credit of each edge: the mean advantage of its turns. Without advantages: the mean return of
// its trajectories minus the mean return of the group.
function setCredits(edges, rows) {
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const measured = edges.some((edge) => edge.credits.some((credit) => credit !== null));
  const group = mean(rows.map((row) => row.return));
  for (const edge of edges) {
    const known = edge.credits.filter((credit) => credit !== null);
    edge.credit = measured ? (known.length ? mean(known) : 0) : mean(edge.rows.map((row) => row.return)) - group;
    delete edge.credits;
  }
  return measured;
}

// Set x and y of every node. Depth gives the column. Within a column, nodes are ordered by the mean
// position of their predecessors, so that fewer edges cross.
function placeNodes(graph) {
  const layers = [];
  for (const node of graph.nodes) (layers[node.depth] ??= []).push(node);
  const row = new Map();
  layers.filter(Boolean).forEach((layer, column) => {
    const above = (node) => {
      const from = graph.edges.filter((edge) => edge.to === node.name && row.has(edge.from));
      if (!from.length) return 0;
      return from.reduce((sum, edge) => sum + row.get(edge.from), 0) / from.length;
    };
    const wanted = new Map(layer.map((node) => [node, above(node)]));
    layer.sort((one, other) => wanted.get(one) - wanted.get(other) || other.count - one.count);
    layer.forEach((node, position) => {
      row.set(node.name, position);
      node.x = STATE.margin + column * STATE.across;
      node.y = STATE.margin + position * STATE.down;
    });
  });
  const nodes = new Map(graph.nodes.map((node) => [node.name, node]));
  graph.edges.forEach((edge) => { edge.bend = bendOf(edge, graph.edges, nodes); });
  const low = Math.max(0, ...graph.edges.map((edge) => edge.bend));
  const width = Math.max(...graph.nodes.map((node) => node.x)) + STATE.wide + STATE.margin;
  const height = Math.max(...graph.nodes.map((node) => node.y)) + STATE.high + STATE.margin + low;
  return { ...graph, width, height };
}

// How far an arrow bends downwards, in pixels. Arrows between the same two states get different bends.
// An arrow that skips a column bends more, so that it does not cross the states of that column.
function bendOf(edge, edges, nodes) {
  const parallelEdges = edges.filter((other) => other.from === edge.from && other.to === edge.to);
  const columns = Math.abs(nodes.get(edge.to).x - nodes.get(edge.from).x) / STATE.across;
  const passes = columns > 1 ? STATE.down * 0.75 : 0;
  return passes + STATE.apart * (parallelEdges.indexOf(edge) - (passes ? 0 : (parallelEdges.length - 1) / 2));
}

function shorten(text, max) {
  return text.length > max ? text.slice(0, max - 1) + "…" : text;
}

// Path from the right side of a node to the left side of the next. It loops below if `to` is not to the
// right of `from`.
function edgePath(from, to, bend) {
  const [x1, y1] = [from.x + STATE.wide, from.y + STATE.high / 2];
  const [x2, y2] = [to.x, to.y + STATE.high / 2];
  if (x2 > x1) {
    const third = (x2 - x1) / 3;
    // A curve passes its control points at three quarters of their distance.
    const hang = bend / 0.75;
    return `M${x1} ${y1}C${x1 + third} ${y1 + hang} ${x2 - third} ${y2 + hang} ${x2} ${y2}`;
  }
  const low = Math.max(y1, y2) + STATE.high + bend;
  return `M${x1} ${y1}C${x1 + 40} ${low} ${x2 - 40} ${low} ${x2} ${y2}`;
}

function drawEdge(edge, nodes, scale, showDetails) {
  const [from, to] = [nodes.get(edge.from), nodes.get(edge.to)];
  const d = edgePath(from, to, edge.bend);
  const wide = 1.5 + Math.min(6, edge.rows.length);
  const strength = (0.25 + 0.75 * Math.min(1, Math.abs(edge.credit) / scale)).toFixed(2);
  const colour = edge.credit === 0 ? "flat" : edge.credit < 0 ? "down" : "up";
  const line = createSvg("path", { d, "stroke-width": wide, style: `--s:${strength}`, class: "edge " + colour });
  const words = `${edge.action}: ${plural(edge.rows.length, "time")}, credit ${signedNumber(edge.credit, 2)}`;
  const group = createSvg("g", { class: "arrow" }, createSvg("path", { d, class: "hit" }), line);
  if (to.x - from.x === STATE.across) {
    const [x, y] = [(from.x + STATE.wide + to.x) / 2, (from.y + to.y + STATE.high) / 2 + edge.bend];
    group.append(createSvg("text", { x, y: y - 5, "text-anchor": "middle" }, shorten(edge.action, 15)));
  }
  return makeButton(group, words, () => showDetails(words, from.text, edge.rows));
}

function drawState(node, edges, showDetails) {
  const box = createSvg("rect", { x: node.x, y: node.y, width: STATE.wide, height: STATE.high, rx: 8 });
  const text = createSvg("text", { x: node.x + 8, y: node.y + 15 }, shorten(node.text, 24));
  const count = createSvg("text", { class: "few", x: node.x + 8, y: node.y + 28 }, plural(node.count, node.end ? "trajectory" : "time"));
  const kind = node.end ? (node.text === "success" ? "state end won" : "state end") : "state";
  const touching = edges.filter((edge) => edge.from === node.name || edge.to === node.name);
  const rows = touching.flatMap((edge) => edge.rows);
  const group = createSvg("g", { class: kind }, box, text, count);
  return makeButton(group, node.text, () => showDetails(plural(new Set(rows).size, "trajectory") + " here", node.text, rows));
}

// The graph, and below it the state or action that was clicked last, with its trajectories.
function drawStateGraph(rows, trajectories, open) {
  const graph = placeNodes(buildStateGraph(rows, trajectories));
  const details = createElement("div", { className: "details", role: "status" });
  const showDetails = (words, state, chosen) => {
    const buttons = [...new Set(chosen)].map((row) => {
      const button = createElement("button", {}, makeOutcome(row.won), ` trajectory ${row.number + 1}`);
      button.addEventListener("click", () => open(row));
      return button;
    });
    details.replaceChildren(createElement("b", { textContent: words }), createElement("p", { className: "observation", textContent: state }), createElement("p", { className: "tools" }, ...buttons));
  };
  const nodes = new Map(graph.nodes.map((node) => [node.name, node]));
  const scale = computeScale(graph.edges.map((edge) => edge.credit));
  const svg = createSvg("svg", { viewBox: `0 0 ${graph.width} ${graph.height}`, width: graph.width, height: graph.height, class: "states", "aria-label": "states of the group" });
  svg.append(...graph.edges.map((edge) => drawEdge(edge, nodes, scale, showDetails)));
  svg.append(...graph.nodes.map((node) => drawState(node, graph.edges, showDetails)));
  const what = graph.measured ? "mean advantage of its turns" : "mean return minus the mean of the group";
  const lead = createElement("p", { className: "quiet" });
  lead.append(`An arrow is an action. Frequent actions have wide arrows. Credit (${what}) above 0 is green, below 0 red.`);
  if (graph.cut) lead.append(` Only the first ${graph.turns} turns are drawn: later turns have too many states.`);
  return createElement("div", {}, lead, createElement("div", { className: "wide", tabIndex: 0 }, svg), details);
}
