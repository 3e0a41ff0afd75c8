// Selection of the trajectories to show: functions of the index that need no page.

const MAX_BINS = 20;

// One row for each trajectory of a file in the index.
function listRows(file) {
  return file.group.map((group, number) => ({
    file: file.name,
    step: file.step,
    number,
    group,
    task: file.tasks[group],
    won: Boolean(file.won[number]),
    return: file.return[number],
    turns: file.turns[number],
    tokens: file.tokens[number],
    audited: Boolean(file.audited?.[number]),
  }));
}

// Sort rows so that the trajectories of a group follow each other. Groups keep their order.
function sortByGroup(rows) {
  const first = new Map();
  rows.forEach((row, position) => {
    const name = groupName(row);
    if (!first.has(name)) first.set(name, position);
  });
  const position = (row) => first.get(groupName(row));
  return [...rows].sort((one, other) => position(one) - position(other) || one.number - other.number);
}

function groupName(row) {
  return row.file + "/" + row.group;
}

// The file of a kind whose step is nearest to `step`, or null if the kind has no file.
function nearestFile(files, kind, step) {
  const own = files.filter((file) => file.kind === kind);
  if (!own.length) return null;
  const distance = (file) => Math.abs(file.step - step);
  return own.reduce((best, file) => (distance(file) < distance(best) ? file : best));
}

// Bins of a histogram: one for each different value, or `most` of equal width if there are more.
function makeBins(values, max = MAX_BINS) {
  const known = [...new Set(values)].sort((one, other) => one - other);
  if (known.length <= max) return known.map((value) => ({ low: value, high: value }));
  const low = known[0];
  const width = (known[known.length - 1] - low) / max;
  const edge = (position) => Number((low + position * width).toPrecision(6));
  const bins = Array.from({ length: max }, (_, position) => ({ low: edge(position), high: edge(position + 1) }));
  // Rounded edges must not lose the ends.
  bins[0].low = low;
  bins[max - 1].high = known[known.length - 1];
  return bins;
}

// Bins of the returns, with the number of rows and of successful rows in each.
function countByBin(rows) {
  const bins = makeBins(rows.map((row) => row.return)).map((bin) => ({ ...bin, count: 0, won: 0 }));
  for (const row of rows) {
    // An edge belongs to the bin below it.
    const bin = bins.find((candidate) => row.return <= candidate.high);
    bin.count += 1;
    bin.won += row.won ? 1 : 0;
  }
  let below = -Infinity;
  for (const bin of bins) {
    bin.above = below;
    below = bin.high;
  }
  return bins;
}

function inBin(value, bin) {
  return value > bin.above && value <= bin.high;
}

function matches(row, choice) {
  if (choice.outcome === "audited" && !row.audited) return false;
  if (["won", "lost"].includes(choice.outcome) && row.won !== (choice.outcome === "won")) return false;
  if (choice.bin && !inBin(row.return, choice.bin)) return false;
  return row.task.toLowerCase().includes(choice.search.toLowerCase());
}

// Absolute value that gets the full colour: 95% of the values lie below it. So a single outlier does
// not make all other colours pale.
function computeScale(values) {
  const sizes = values.map(Math.abs).sort((one, other) => one - other);
  return Math.max(sizes[Math.floor(0.95 * (sizes.length - 1))] ?? 0, 1e-9);
}

function shortNumber(value) {
  return String(Number(value.toPrecision(3)));
}

function plural(count, word) {
  return count.toLocaleString("en") + " " + (count === 1 ? word : word.replace(/([^aeiou])y$/, "$1ie") + "s");
}
