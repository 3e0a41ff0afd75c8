// Which plays are shown, without a page: functions of what the index says.

const MOST_BINS = 20;

// One row per play of a file of the index.
function rowsOf(file) {
  return file.group.map((group, number) => ({
    file: file.name,
    step: file.step,
    number,
    group,
    task: file.tasks[group],
    won: Boolean(file.won[number]),
    earned: file.return[number],
    turns: file.turns[number],
    tokens: file.tokens[number],
    audited: Boolean(file.audited?.[number]),
  }));
}

// Plays of one group stand together; the groups keep their order.
function byGroup(rows) {
  const first = new Map();
  rows.forEach((row, place) => {
    const name = groupName(row);
    if (!first.has(name)) first.set(name, place);
  });
  const place = (row) => first.get(groupName(row));
  return [...rows].sort((one, other) => place(one) - place(other) || one.number - other.number);
}

function groupName(row) {
  return row.file + "/" + row.group;
}

// The file of a kind whose step is nearest to the one asked for; null without any.
function nearestFile(files, kind, step) {
  const own = files.filter((file) => file.kind === kind);
  if (!own.length) return null;
  const distance = (file) => Math.abs(file.step - step);
  return own.reduce((best, file) => (distance(file) < distance(best) ? file : best));
}

// Where values lie: one bin for every value if they are few, else bins of equal width.
function binsOf(values, most = MOST_BINS) {
  const known = [...new Set(values)].sort((one, other) => one - other);
  if (known.length <= most) return known.map((value) => ({ low: value, high: value }));
  const low = known[0];
  const width = (known[known.length - 1] - low) / most;
  const edge = (place) => Number((low + place * width).toPrecision(6));
  const bins = Array.from({ length: most }, (_, place) => ({ low: edge(place), high: edge(place + 1) }));
  // Rounded edges must not lose the ends.
  bins[0].low = low;
  bins[most - 1].high = known[known.length - 1];
  return bins;
}

// Every bin with how many of the rows lie in it and how many of these won.
function countedBins(rows) {
  const bins = binsOf(rows.map((row) => row.earned)).map((bin) => ({ ...bin, count: 0, won: 0 }));
  for (const row of rows) {
    // An edge belongs to the bin below it.
    const bin = bins.find((candidate) => row.earned <= candidate.high);
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
  if (choice.bin && !inBin(row.earned, choice.bin)) return false;
  return row.task.toLowerCase().includes(choice.search.toLowerCase());
}

// The size at which colours are full: 95% of the values lie below it, so that a single outlier
// leaves the others their colour.
function fullSize(values) {
  const sizes = values.map(Math.abs).sort((one, other) => one - other);
  return Math.max(sizes[Math.floor(0.95 * (sizes.length - 1))] ?? 0, 1e-9);
}

function shortNumber(value) {
  return String(Number(value.toPrecision(3)));
}

function plural(count, word) {
  return count.toLocaleString("en") + " " + word + (count === 1 ? "" : "s");
}
