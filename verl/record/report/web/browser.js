// Browser of the trajectories: choose a step, see a histogram of returns and a list, read one.

const ROWS_AT_A_TIME = 60; // list rows that are created at a time
const VIEWS = { trajectory: "trajectory", group: "side by side", states: "state graph" };
const KINDS = { train: "in training", val: "held-out", audit: "audited" };

class Browser {
  constructor(index, readChunk) {
    this.files = index.files;
    this.readChunk = readChunk;
    this.chunks = new Map(); // file name -> promise of its trajectories
    this.choice = { kind: "train", step: "all", outcome: "", search: "", bin: null };
    this.overlay = "advantage";
    this.rows = []; // trajectories that match the choice, in the order of the list
    this.numCreated = 0; // number of rows that have a list element
    this.open = null; // the row whose trajectory is shown
    this.view = "trajectory"; // one of VIEWS
    byId("lead").textContent = index.lead;
    this.more = new IntersectionObserver((seen) => {
      if (seen.some((entry) => entry.isIntersecting)) this.createRows();
    });
    this.addListeners();
  }

  // ---- choosing

  addListeners() {
    byId("kind").addEventListener("change", (event) => this.choose({ kind: event.target.value, step: this.choice.step }));
    byId("step").addEventListener("change", (event) => {
      this.choose({ step: event.target.value === "all" ? "all" : Number(event.target.value) });
    });
    byId("outcome").addEventListener("change", (event) => this.choose({ outcome: event.target.value }));
    byId("search").addEventListener("input", (event) => this.choose({ search: event.target.value }));
    byId("earlier").addEventListener("click", () => this.moveStep(-1));
    byId("later").addEventListener("click", () => this.moveStep(1));
    byId("help").addEventListener("click", () => {
      byId("keys").hidden = !byId("keys").hidden;
      byId("help").setAttribute("aria-expanded", String(!byId("keys").hidden));
    });
    document.addEventListener("keydown", (event) => this.onKey(event));
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
    this.updateList();
  }

  moveStep(move) {
    const steps = this.filesOf(this.choice.kind).map((file) => file.step);
    const current = this.choice.step === "all" ? steps.length : steps.indexOf(this.choice.step);
    const next = steps[current + move];
    if (next !== undefined) this.choose({ step: next });
  }

  updateList() {
    const { kind, step } = this.choice;
    const files = this.filesOf(kind).filter((file) => step === "all" || file.step === step);
    const all = files.flatMap((file) => sortByGroup(listRows(file)));
    this.rows = all.filter((row) => matches(row, this.choice));
    this.showChoice(files);
    byId("returns").replaceChildren(this.histogram(all));
    this.showCount(files, all.length);
    byId("list").replaceChildren();
    this.numCreated = 0;
    this.createRows();
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
    const bins = countByBin(rows);
    const [width, height, foot] = [560, 120, 18];
    const max = Math.max(1, ...bins.map((bin) => bin.count));
    const barWidth = width / Math.max(bins.length, 4);
    const svg = createSvg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-label": "distribution of returns" });
    bins.forEach((bin, position) => svg.append(this.bar(bin, position * barWidth, barWidth, height - foot, max)));
    byId("returns-title").textContent = "Returns, " + plural(rows.length, "trajectory") + " (filled part: success)";
    return svg;
  }

  bar(bin, left, barWidth, height, max) {
    const maxHeight = height - 14; // space for the count above the highest bar
    const heightOf = (count) => Math.max(count ? 1.5 : 0, (count / max) * maxHeight);
    const rect = (count, name) => createSvg("rect", {
      class: name, x: left + 2, width: barWidth - 4, y: height - heightOf(count), height: heightOf(count), rx: 2,
    });
    const text = (words, y) => createSvg("text", { x: left + barWidth / 2, y, "text-anchor": "middle" }, words);
    const chosen = this.choice.bin && this.choice.bin.high === bin.high;
    const parts = [
      createSvg("rect", { class: "hit", x: left, width: barWidth, y: 0, height: height + 18 }),
      rect(bin.count, "bar"), rect(bin.won, "bar won"),
      text(bin.count || "", height - heightOf(bin.count) - 3), text(shortNumber(bin.high), height + 14),
    ];
    const label = `return ${binLabel(bin)}: ${plural(bin.count, "trajectory")}, ${bin.won} successful`;
    const group = createSvg("g", { class: chosen ? "bin chosen" : "bin" }, ...parts);
    return makeButton(group, label, () => {
      this.choose({ bin: chosen ? null : bin });
      byId("list").querySelector("button")?.focus();
    });
  }

  // ---- the list

  createRows() {
    const list = byId("list");
    this.more.disconnect();
    for (const row of this.rows.slice(this.numCreated, this.numCreated + ROWS_AT_A_TIME)) {
      const last = this.rows[this.numCreated - 1];
      if (!last || groupName(last) !== groupName(row)) list.append(this.createGroupHead(row));
      list.append(createElement("li", {}, this.createRowButton(row, this.numCreated)));
      this.numCreated += 1;
    }
    if (this.numCreated < this.rows.length) this.more.observe(list.lastElementChild);
  }

  createGroupHead(row) {
    const members = this.listMembers(row);
    const won = members.filter((member) => member.won).length;
    const where = this.choice.step === "all" ? `step ${row.step} · ` : "";
    const words = createElement("span", { textContent: row.task });
    const count = createElement("span", { className: "quiet", textContent: `${where}success ${won} of ${members.length}` });
    return createElement("li", { className: "group" }, words, " ", count);
  }

  listMembers(row) {
    const file = this.files.find((candidate) => candidate.name === row.file);
    return listRows(file).filter((other) => other.group === row.group);
  }

  createRowButton(row, position) {
    const words = `return ${shortNumber(row.return)} · ${plural(row.turns, "turn")} · ${plural(row.tokens, "token")}`;
    const button = createElement("button", { className: "trajectory" }, makeOutcome(row.won), createElement("span", { textContent: words }));
    if (row.audited) button.append(makeFlag("audited", "own"));
    button.dataset.position = position;
    button.setAttribute("aria-current", String(this.isOpen(row)));
    button.addEventListener("click", () => this.show(row, true));
    return button;
  }

  isOpen(row) {
    return this.open !== null && this.open.file === row.file && this.open.number === row.number;
  }

  findButton(position) {
    return byId("list").querySelector(`[data-position="${position}"]`);
  }

  moveRow(by) {
    const focused = document.activeElement.closest("button.trajectory");
    const opened = this.rows.findIndex((row) => this.isOpen(row));
    const current = focused ? Number(focused.dataset.position) : opened;
    const next = Math.min(Math.max(current + by, 0), this.rows.length - 1);
    if (next < 0) return;
    while (this.numCreated <= next) this.createRows();
    this.findButton(next).focus();
    if (this.open) this.show(this.rows[next], false);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, svg")) return;
    const inside = event.target.closest("#list") !== null;
    const actions = { j: () => this.moveRow(1), k: () => this.moveRow(-1), Escape: () => this.close() };
    for (const view of Object.keys(VIEWS)) actions[view[0]] = () => this.open && this.show(this.open, true, view);
    const arrows = {
      ArrowDown: () => this.moveRow(1),
      ArrowUp: () => this.moveRow(-1),
      ArrowLeft: () => this.moveStep(-1),
      ArrowRight: () => this.moveStep(1),
    };
    const action = actions[event.key] ?? (inside ? arrows[event.key] : undefined);
    if (!action) return;
    event.preventDefault();
    action();
    // The list was created again and lost the keyboard focus: focus its first row.
    if (inside && document.activeElement === document.body) this.findButton(0)?.focus();
  }

  // ---- one trajectory

  loadTrajectories(name) {
    if (!this.chunks.has(name)) this.chunks.set(name, this.readChunk(name).then((chunk) => chunk.trajectories));
    return this.chunks.get(name);
  }

  setOpen(row) {
    this.open = row;
    for (const button of byId("list").querySelectorAll("button.trajectory")) {
      button.setAttribute("aria-current", String(this.isOpen(this.rows[button.dataset.position])));
    }
  }

  // Scroll the list to a row, without scrolling the page.
  scrollToRow(position) {
    while (this.numCreated <= position && this.numCreated < this.rows.length) this.createRows();
    const [list, button] = [byId("list"), this.findButton(position)];
    const seen = button.offsetTop >= list.scrollTop && button.offsetTop < list.scrollTop + list.clientHeight - 30;
    if (!seen) list.scrollTop = button.offsetTop - list.clientHeight / 2;
  }

  async show(row, focus, view = this.view) {
    this.setOpen(row);
    this.view = view;
    const trajectories = await this.loadTrajectories(row.file);
    if (this.open !== row || this.view !== view) return; // the user opened another one meanwhile
    const members = orderMembers(this.listMembers(row), row);
    const rows = view === "trajectory" ? [row] : members;
    const head = this.createHead(row, trajectories[row.number], members.length);
    const shown = rows.map((member) => trajectories[member.number]);
    const body = view === "states"
      ? drawStateGraph(rows, shown, (member) => this.show(member, true, "trajectory"))
      : this.createBody(rows, shown);
    this.fillPanel([...head, body], focus);
    history.replaceState(null, "", `#${row.file}/${row.number}${view === "trajectory" ? "" : "/" + view}`);
  }

  fillPanel(parts, focus) {
    const shown = byId("shown");
    const close = createElement("button", { className: "close", textContent: "×", title: "back to the list (escape)" });
    close.setAttribute("aria-label", "back to the list");
    close.addEventListener("click", () => this.close());
    shown.replaceChildren(close, ...parts);
    shown.hidden = false;
    byId("browser").classList.toggle("broad", this.view !== "trajectory");
    if (focus) shown.focus();
  }

  createHead(row, trajectory, members) {
    const words = `${KINDS[row.file.split("-")[0]]}, step ${row.step} · ${trajectory.name} · return ${shortNumber(row.return)}`;
    const title = createElement("h3", {}, makeOutcome(row.won), " ", row.task);
    if (trajectory.aborted) title.append(" ", makeFlag("aborted"));
    const prompt = createElement("details", { className: "prompt" }, createElement("summary", { textContent: "prompt" }));
    prompt.append(createElement("pre", { textContent: trajectory.prompt }));
    const parts = [title, createElement("p", { className: "quiet", textContent: words }), prompt];
    return members > 1 ? [...parts, this.createViewButtons(row)] : parts;
  }

  // Buttons for the views of a trajectory and its group.
  createViewButtons(row) {
    const buttons = Object.entries(VIEWS).map(([view, text]) => {
      const button = createElement("button", { textContent: text, title: `key ${view[0]}` });
      button.setAttribute("aria-pressed", String(view === this.view));
      button.addEventListener("click", () => this.show(row, true, view));
      return button;
    });
    return createElement("p", { className: "tools" }, ...buttons);
  }

  // The turns of one trajectory, or of several side by side, coloured by the chosen overlay.
  createBody(rows, trajectories) {
    const body = createElement("div");
    const names = listOverlays(trajectories);
    const draw = (name) => {
      if (name) this.overlay = name;
      const shown = names.includes(this.overlay) ? this.overlay : names[0] ?? "advantage";
      const content = this.view === "trajectory"
        ? listTurns(trajectories[0], shown)
        : compareTrajectories(rows, trajectories, shown, (row) => this.show(row, true));
      body.replaceChildren(makeOverlayMenu(names, shown, draw), content);
    };
    draw();
    return body;
  }

  close() {
    const position = this.rows.findIndex((row) => this.isOpen(row));
    this.setOpen(null);
    byId("shown").hidden = true;
    byId("browser").classList.remove("broad");
    history.replaceState(null, "", "#trajectories");
    this.findButton(Math.max(position, 0))?.focus();
  }

  // ---- called by charts and by live updates

  // Show the trajectories of a step, after a click on a chart.
  showStep(kind, step) {
    const there = this.filesOf(kind).length ? kind : this.files[0].kind;
    this.choose({ kind: there, step, outcome: "", search: "", bin: null });
    byId("search").value = "";
    byId("trajectories").scrollIntoView();
    this.findButton(0)?.focus();
  }

  // Use the index of a later state of the run. The choice and the open trajectory stay.
  updateIndex(index) {
    const before = new Map(this.files.map((file) => [file.name, JSON.stringify(file)]));
    const changed = index.files.filter((file) => before.get(file.name) !== JSON.stringify(file));
    if (!changed.length) return;
    for (const file of changed) this.chunks.delete(file.name);
    this.files = index.files;
    const focused = document.activeElement.closest("button.trajectory")?.dataset.position;
    const scrolled = byId("list").scrollTop;
    this.choose({});
    byId("list").scrollTop = scrolled;
    if (focused === undefined || focused >= this.rows.length) return;
    this.scrollToRow(Number(focused));
    this.findButton(focused).focus({ preventScroll: true });
  }

  // Open the trajectory that the address names, else a successful one of the last training step.
  async openFromAddress(address) {
    const [, name, number, view] = /^#([a-z]+-\d+)\/(\d+)(?:\/([a-z]+))?$/.exec(address) ?? [];
    const named = this.files.find((file) => file.name === name);
    const file = named ?? this.filesOf("train").at(-1) ?? this.files.at(-1);
    this.choose({ kind: file.kind, step: file.step });
    const wanted = named ? Number(number) : file.pair[0];
    const position = this.rows.findIndex((candidate) => candidate.number === wanted);
    if (position < 0) return;
    await this.show(this.rows[position], false, VIEWS[view] ? view : "trajectory");
    this.scrollToRow(position);
    if (named) byId("shown").scrollIntoView();
  }
}

function binLabel(bin) {
  if (bin.low === bin.high) return shortNumber(bin.high);
  return shortNumber(bin.low) + " to " + shortNumber(bin.high);
}
