// Interactive charts: the values of a step next to the cursor, and its trajectories after a click.

const tip = byId("tip");

function findNearest(xs, value) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - value) < Math.abs(xs[best] - value)) best = i;
  return best;
}

function makeTipLine(series, index) {
  const name = series.range ? series.name.split(",")[0] + " (" + series.range[index] + ")" : series.name;
  const mark = createElement("i", { className: "c-" + series.color });
  return createElement("div", {}, mark, series.y[index] + " ", createElement("span", { textContent: name }));
}

// Kind of trajectories (train, val, audit) of the series whose point at `step` is nearest to `height`,
// in pixels of the drawing.
function findKind(chart, step, height) {
  const here = chart.series.filter((series) => series.x.includes(step));
  const distance = (series) => Math.abs(series.at[series.x.indexOf(step)] - height);
  return here.reduce((best, series) => (distance(series) < distance(best) ? series : best)).trajectories;
}

// One chart with a vertical line at a step. The mouse or the arrow keys move the line.
class InteractiveChart {
  constructor(svg, showTrajectories) {
    this.svg = svg;
    this.chart = JSON.parse(svg.dataset.hover);
    this.showTrajectories = showTrajectories;
    this.steps = [...new Set(this.chart.series.flatMap((series) => series.x))].sort((a, b) => a - b);
    this.at = null; // the step under the cursor line
    const { top, bottom } = this.chart;
    this.cursor = createSvg("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    svg.append(this.cursor);
    svg.addEventListener("mouseleave", () => this.hide());
    svg.addEventListener("mousemove", (event) => this.onMouseMove(event));
    if (showTrajectories && this.chart.axis === "step" && this.steps.length) this.makeClickable();
    else svg.setAttribute("role", "img");
  }

  makeClickable() {
    this.svg.classList.add("opens");
    this.svg.setAttribute("tabindex", "0");
    this.svg.setAttribute("role", "button");
    this.svg.addEventListener("blur", () => this.hide());
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
    this.svg.addEventListener("click", (event) => {
      const [left, top] = this.positionOf(event);
      const step = this.stepAt(left);
      if (step !== null) this.showTrajectories(findKind(this.chart, step, top), step);
    });
  }

  // Position of the mouse in pixels of the drawing.
  positionOf(event) {
    const box = this.svg.getBoundingClientRect();
    const scale = this.svg.viewBox.baseVal.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  }

  stepAt(pixel) {
    const { left, right, low, high } = this.chart;
    const share = (pixel - left) / (right - left);
    if (share < -0.02 || share > 1.02 || !this.steps.length) return null;
    return this.steps[findNearest(this.steps, low + share * (high - low))];
  }

  pixelOf(step) {
    const { left, right, low, high } = this.chart;
    return left + (right - left) * (step - low) / (high - low);
  }

  onMouseMove(event) {
    const step = this.stepAt(this.positionOf(event)[0]);
    if (step === null) this.hide();
    else this.showValues(step, event.clientX, event.clientY);
  }

  // Show the values of a step next to a point of the window.
  showValues(step, left, top) {
    this.at = step;
    for (const end of ["x1", "x2"]) this.cursor.setAttribute(end, this.pixelOf(step));
    this.cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(createElement("b", { textContent: this.chart.axis + " " + step }));
    for (const series of [...this.chart.series].reverse()) {
      const index = series.x.indexOf(step);
      if (index >= 0) tip.append(makeTipLine(series, index));
    }
    tip.hidden = false;
    const right = left + 16 + tip.offsetWidth < window.innerWidth;
    tip.style.left = Math.max(0, right ? left + 16 : left - 16 - tip.offsetWidth) + "px";
    tip.style.top = Math.min(top + 12, window.innerHeight - tip.offsetHeight - 8) + "px";
  }

  hide() {
    tip.hidden = true;
    this.cursor.setAttribute("visibility", "hidden");
    this.at = null;
  }

  onKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.hide();
    if (!move && !(event.key === "Enter" && this.at !== null)) return;
    event.preventDefault();
    if (move) this.moveCursor(move);
    // The last series is drawn on top, because it is the main one of the chart.
    else this.showTrajectories(findKind(this.chart, this.at, this.chart.series.at(-1).at[0]), this.at);
  }

  moveCursor(move) {
    const last = this.steps.length - 1;
    const next = this.at === null ? last : this.steps.indexOf(this.at) + move;
    const step = this.steps[Math.min(Math.max(next, 0), last)];
    const box = this.svg.getBoundingClientRect();
    this.showValues(step, box.left + this.pixelOf(step) * box.width / this.svg.viewBox.baseVal.width, box.top);
  }
}
