// Browser of the trajectories: choose a step, see a histogram of returns and a list, read one.

const BATCH = 60; // list rows that are created at a time
const VIEWS = { play: "trajectory", group: "side by side", states: "state graph" };
const KINDS = { train: "in training", val: "held-out", audit: "audited" };

class Browser {
  constructor(index, readChunk) {
    this.files = index.files;
    this.readChunk = readChunk;
    this.chunks = new Map(); // file name -> promise of its trajectories
    this.choice = { kind: "train", step: "all", outcome: "", search: "", bin: null };
    this.overlay = "advantage";
    this.rows = []; // trajectories that match the choice, in the order of the list
    this.made = 0; // number of rows that have a list element
    this.open = null; // the row whose trajectory is shown
    this.view = "play"; // one of VIEWS
    byId("lead").textContent = index.lead;
    this.more = new IntersectionObserver((seen) => {
      if (seen.some((entry) => entry.isIntersecting)) this.makeRows();
    });
    this.listen();
  }

  // ---- choosing

  listen() {
    byId("kind").addEventListener("change", (event) => this.choose({ kind: event.target.value, step: this.choice.step }));
    byId("step").addEventListener("change", (event) => {
      this.choose({ step: event.target.value === "all" ? "all" : Number(event.target.value) });
    });
    byId("outcome").addEventListener("change", (event) => this.choose({ outcome: event.target.value }));
    byId("search").addEventListener("input", (event) => this.choose({ search: event.target.value }));
    byId("earlier").addEventListener("click", () => this.neighbour(-1));
    byId("later").addEventListener("click", () => this.neighbour(1));
    byId("help").addEventListener("click", () => {
      byId("keys").hidden = !byId("keys").hidden;
      byId("help").setAttribute("aria-expanded", String(!byId("keys").hidden));
    });
    document.addEventListener("keydown", (event) => this.key(event));
  }

  filesOf(kind) {
    return this.files.filter((file) => file.kind === kind);
  }

  // Change the choice. A change of step or kind clears the chosen bin, because the returns differ.
  choose(change) {
    const before = this.choice;
    this.choice = { ...before, ...change };
    if (this.choice.step !== "all") {
      this.choice.step = nearestFile(this.files, this.choice.kind, this.choice.step)?.step ?? "all";
    }
    const { kind, step } = this.choice;
    if (!("bin" in change) && (kind !== before.kind || step !== before.step)) this.choice.bin = null;
    this.refresh();
  }

  neighbour(move) {
    const steps = this.filesOf(this.choice.kind).map((file) => file.step);
    const here = this.choice.step === "all" ? steps.length : steps.indexOf(this.choice.step);
    const next = steps[here + move];
    if (next !== undefined) this.choose({ step: next });
  }

  refresh() {
    const { kind, step } = this.choice;
    const files = this.filesOf(kind).filter((file) => step === "all" || file.step === step);
    const all = files.flatMap((file) => byGroup(rowsOf(file)));
    this.rows = all.filter((row) => matches(row, this.choice));
    this.showChoice(files);
    byId("returns").replaceChildren(this.histogram(all));
    this.showCount(files, all.length);
    byId("list").replaceChildren();
    this.made = 0;
    this.makeRows();
  }

  showChoice() {
    const kinds = [...new Set(this.files.map((file) => file.kind))];
    const { kind, step } = this.choice;
    byId("kind").replaceChildren(...kinds.map((name) => new Option(KINDS[name], name, false, name === kind)));
    const steps = this.filesOf(kind).map((file) => new Option(file.step, file.step, false, file.step === step));
    byId("step").replaceChildren(...steps, new Option("all", "all", false, step === "all"));
    byId("outcome").value = this.choice.outcome;
  }

  showCount(files, all) {
    const parts = [plural(this.rows.length, "trajectory")];
    if (this.rows.length !== all) parts.push("of " + all.toLocaleString("en"));
    if (this.choice.bin) parts.push("with return " + binLabel(this.choice.bin));
    if (files.some((file) => !file.whole)) parts.push("· the rollout file has more of them than the page");
    byId("count").textContent = parts.join(" ");
  }

  // ---- returns

  histogram(rows) {
    const bins = countedBins(rows);
    const [width, height, foot] = [560, 120, 18];
    const most = Math.max(1, ...bins.map((bin) => bin.count));
    const wide = width / Math.max(bins.length, 4);
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, "aria-label": "distribution of returns" });
    bins.forEach((bin, place) => svg.append(this.bar(bin, place * wide, wide, height - foot, most)));
    byId("returns-title").textContent = "Returns, " + plural(rows.length, "trajectory") + " (filled part: success)";
    return svg;
  }

  bar(bin, left, wide, height, most) {
    const room = height - 14; // space for the count above the highest bar
    const tall = (count) => Math.max(count ? 1.5 : 0, (count / most) * room);
    const rect = (count, name) => drawn("rect", {
      class: name, x: left + 2, width: wide - 4, y: height - tall(count), height: tall(count), rx: 2,
    });
    const text = (words, y) => drawn("text", { x: left + wide / 2, y, "text-anchor": "middle" }, words);
    const chosen = this.choice.bin && this.choice.bin.high === bin.high;
    const parts = [
      drawn("rect", { class: "hit", x: left, width: wide, y: 0, height: height + 18 }),
      rect(bin.count, "bar"), rect(bin.won, "bar won"),
      text(bin.count || "", height - tall(bin.count) - 3), text(shortNumber(bin.high), height + 14),
    ];
    const label = `return ${binLabel(bin)}: ${plural(bin.count, "trajectory")}, ${bin.won} successful`;
    const group = drawn("g", { class: chosen ? "bin chosen" : "bin" }, ...parts);
    return pressable(group, label, () => {
      this.choose({ bin: chosen ? null : bin });
      byId("list").querySelector("button")?.focus();
    });
  }

  // ---- the list

  makeRows() {
    const list = byId("list");
    this.more.disconnect();
    for (const row of this.rows.slice(this.made, this.made + BATCH)) {
      const last = this.rows[this.made - 1];
      if (!last || groupName(last) !== groupName(row)) list.append(this.groupHead(row));
      list.append(make("li", {}, this.rowButton(row, this.made)));
      this.made += 1;
    }
    if (this.made < this.rows.length) this.more.observe(list.lastElementChild);
  }

  groupHead(row) {
    const members = this.members(row);
    const won = members.filter((member) => member.won).length;
    const where = this.choice.step === "all" ? `step ${row.step} · ` : "";
    const words = make("span", { textContent: row.task });
    const count = make("span", { className: "quiet", textContent: `${where}success ${won} of ${members.length}` });
    return make("li", { className: "group" }, words, " ", count);
  }

  members(row) {
    const file = this.files.find((candidate) => candidate.name === row.file);
    return rowsOf(file).filter((other) => other.group === row.group);
  }

  rowButton(row, place) {
    const words = `return ${shortNumber(row.earned)} · ${plural(row.turns, "turn")} · ${plural(row.tokens, "token")}`;
    const button = make("button", { className: "play" }, outcome(row.won), make("span", { textContent: words }));
    if (row.audited) button.append(flag("audited", "own"));
    button.dataset.place = place;
    button.setAttribute("aria-current", String(this.isOpen(row)));
    button.addEventListener("click", () => this.show(row, true));
    return button;
  }

  isOpen(row) {
    return this.open !== null && this.open.file === row.file && this.open.number === row.number;
  }

  button(place) {
    return byId("list").querySelector(`[data-place="${place}"]`);
  }

  move(by) {
    const focused = document.activeElement.closest("button.play");
    const opened = this.rows.findIndex((row) => this.isOpen(row));
    const here = focused ? Number(focused.dataset.place) : opened;
    const next = Math.min(Math.max(here + by, 0), this.rows.length - 1);
    if (next < 0) return;
    while (this.made <= next) this.makeRows();
    this.button(next).focus();
    if (this.open) this.show(this.rows[next], false);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, svg")) return;
    const inside = event.target.closest("#list") !== null;
    const acts = { j: () => this.move(1), k: () => this.move(-1), Escape: () => this.close() };
    for (const view of Object.keys(VIEWS)) acts[view[0]] = () => this.open && this.show(this.open, true, view);
    const arrows = {
      ArrowDown: () => this.move(1),
      ArrowUp: () => this.move(-1),
      ArrowLeft: () => this.neighbour(-1),
      ArrowRight: () => this.neighbour(1),
    };
    const act = acts[event.key] ?? (inside ? arrows[event.key] : undefined);
    if (!act) return;
    event.preventDefault();
    act();
    // The list was created again and lost the keyboard focus: focus its first row.
    if (inside && document.activeElement === document.body) this.button(0)?.focus();
  }

  // ---- one trajectory

  plays(name) {
    if (!this.chunks.has(name)) this.chunks.set(name, this.readChunk(name).then((chunk) => chunk.plays));
    return this.chunks.get(name);
  }

  mark(row) {
    this.open = row;
    for (const button of byId("list").querySelectorAll("button.play")) {
      button.setAttribute("aria-current", String(this.isOpen(this.rows[button.dataset.place])));
    }
  }

  // Scroll the list to a row, without scrolling the page.
  reveal(place) {
    while (this.made <= place && this.made < this.rows.length) this.makeRows();
    const [list, button] = [byId("list"), this.button(place)];
    const seen = button.offsetTop >= list.scrollTop && button.offsetTop < list.scrollTop + list.clientHeight - 30;
    if (!seen) list.scrollTop = button.offsetTop - list.clientHeight / 2;
  }

  async show(row, focus, view = this.view) {
    this.mark(row);
    this.view = view;
    const plays = await this.plays(row.file);
    if (this.open !== row || this.view !== view) return; // the user opened another one meanwhile
    const members = besides(this.members(row), row);
    const rows = view === "play" ? [row] : members;
    const head = this.head(row, plays[row.number], members.length);
    const shown = rows.map((member) => plays[member.number]);
    const body = view === "states"
      ? stateDrawing(rows, shown, (member) => this.show(member, true, "play"))
      : this.body(rows, shown);
    this.fill([...head, body], focus);
    history.replaceState(null, "", `#${row.file}/${row.number}${view === "play" ? "" : "/" + view}`);
  }

  fill(parts, focus) {
    const shown = byId("shown");
    const close = make("button", { className: "close", textContent: "×", title: "back to the list (escape)" });
    close.setAttribute("aria-label", "back to the list");
    close.addEventListener("click", () => this.close());
    shown.replaceChildren(close, ...parts);
    shown.hidden = false;
    byId("browser").classList.toggle("broad", this.view !== "play");
    if (focus) shown.focus();
  }

  head(row, play, members) {
    const words = `${KINDS[row.file.split("-")[0]]}, step ${row.step} · ${play.name} · return ${shortNumber(row.earned)}`;
    const title = make("h3", {}, outcome(row.won), " ", row.task);
    if (play.aborted) title.append(" ", flag("aborted"));
    const prompt = make("details", { className: "prompt" }, make("summary", { textContent: "prompt" }));
    prompt.append(make("pre", { textContent: play.prompt }));
    const parts = [title, make("p", { className: "quiet", textContent: words }), prompt];
    return members > 1 ? [...parts, this.tools(row)] : parts;
  }

  // Buttons for the views of a trajectory and its group.
  tools(row) {
    const buttons = Object.entries(VIEWS).map(([view, text]) => {
      const button = make("button", { textContent: text, title: `key ${view[0]}` });
      button.setAttribute("aria-pressed", String(view === this.view));
      button.addEventListener("click", () => this.show(row, true, view));
      return button;
    });
    return make("p", { className: "tools" }, ...buttons);
  }

  // The turns of one trajectory, or of several side by side, coloured by the chosen overlay.
  body(rows, plays) {
    const body = make("div");
    const names = overlaysOf(plays);
    const draw = (name) => {
      if (name) this.overlay = name;
      const shown = names.includes(this.overlay) ? this.overlay : names[0] ?? "advantage";
      const content = this.view === "play"
        ? turns(plays[0], shown)
        : comparison(rows, plays, shown, (row) => this.show(row, true));
      body.replaceChildren(overlayChoice(names, shown, draw), content);
    };
    draw();
    return body;
  }

  close() {
    const place = this.rows.findIndex((row) => this.isOpen(row));
    this.mark(null);
    byId("shown").hidden = true;
    byId("browser").classList.remove("broad");
    history.replaceState(null, "", "#plays");
    this.button(Math.max(place, 0))?.focus();
  }

  // ---- called by charts and by live updates

  // Show the trajectories of a step, after a click on a chart.
  showStep(kind, step) {
    const there = this.filesOf(kind).length ? kind : this.files[0].kind;
    this.choose({ kind: there, step, outcome: "", search: "", bin: null });
    byId("search").value = "";
    byId("plays").scrollIntoView();
    this.button(0)?.focus();
  }

  // Use the index of a later state of the run. The choice and the open trajectory stay.
  renew(index) {
    const before = new Map(this.files.map((file) => [file.name, JSON.stringify(file)]));
    const changed = index.files.filter((file) => before.get(file.name) !== JSON.stringify(file));
    if (!changed.length) return;
    for (const file of changed) this.chunks.delete(file.name);
    this.files = index.files;
    const focused = document.activeElement.closest("button.play")?.dataset.place;
    const scrolled = byId("list").scrollTop;
    this.choose({});
    byId("list").scrollTop = scrolled;
    if (focused === undefined || focused >= this.rows.length) return;
    this.reveal(Number(focused));
    this.button(focused).focus({ preventScroll: true });
  }

  // Open the trajectory that the address names, else a successful one of the last training step.
  async begin(address) {
    const [, name, number, view] = /^#([a-z]+-\d+)\/(\d+)(?:\/([a-z]+))?$/.exec(address) ?? [];
    const named = this.files.find((file) => file.name === name);
    const file = named ?? this.filesOf("train").at(-1) ?? this.files.at(-1);
    this.choose({ kind: file.kind, step: file.step });
    const wanted = named ? Number(number) : file.pair[0];
    const place = this.rows.findIndex((candidate) => candidate.number === wanted);
    if (place < 0) return;
    await this.show(this.rows[place], false, VIEWS[view] ? view : "play");
    this.reveal(place);
  }
}

function binLabel(bin) {
  if (bin.low === bin.high) return shortNumber(bin.high);
  return shortNumber(bin.low) + " to " + shortNumber(bin.high);
}
