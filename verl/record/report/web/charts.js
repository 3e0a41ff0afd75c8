// Charts answer the cursor: values of a step beside it, and the plays of the step on a click.

const tip = byId("tip");

function nearest(xs, value) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - value) < Math.abs(xs[best] - value)) best = i;
  return best;
}

function tipLine(series, index) {
  const name = series.range ? series.name.split(",")[0] + " (" + series.range[index] + ")" : series.name;
  const mark = make("i", { className: "c-" + series.color });
  return make("div", {}, mark, series.y[index] + " ", make("span", { textContent: name }));
}

// Of which plays the point of a step tells that is nearest to a height, in pixels of the drawing.
function kindAt(chart, step, height) {
  const here = chart.series.filter((series) => series.x.includes(step));
  const distance = (series) => Math.abs(series.at[series.x.indexOf(step)] - height);
  return here.reduce((best, series) => (distance(series) < distance(best) ? series : best)).plays;
}

function answering(svg, showPlays) {
  const chart = JSON.parse(svg.dataset.hover);
  const steps = [...new Set(chart.series.flatMap((series) => series.x))].sort((a, b) => a - b);
  const cursor = drawn("line", { class: "cursor", y1: chart.top, y2: chart.bottom, visibility: "hidden" });
  let at = null;
  svg.append(cursor);
  const hide = () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
    at = null;
  };
  const place = (step) => chart.left + (chart.right - chart.left) * (step - chart.low) / (chart.high - chart.low);
  const point = (step, left, top) => {
    at = step;
    cursor.setAttribute("x1", place(step));
    cursor.setAttribute("x2", place(step));
    cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(make("b", { textContent: chart.axis + " " + step }));
    for (const series of [...chart.series].reverse()) {
      const index = series.x.indexOf(step);
      if (index >= 0) tip.append(tipLine(series, index));
    }
    tip.hidden = false;
    const right = left + 16 + tip.offsetWidth < window.innerWidth;
    tip.style.left = Math.max(0, right ? left + 16 : left - 16 - tip.offsetWidth) + "px";
    tip.style.top = Math.min(top + 12, window.innerHeight - tip.offsetHeight - 8) + "px";
  };
  const stepAt = (event) => {
    const box = svg.getBoundingClientRect();
    const pixel = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const share = (pixel - chart.left) / (chart.right - chart.left);
    if (share < -0.02 || share > 1.02 || !steps.length) return null;
    return steps[nearest(steps, chart.low + share * (chart.high - chart.low))];
  };
  const height = (event) => {
    const box = svg.getBoundingClientRect();
    return (event.clientY - box.top) * svg.viewBox.baseVal.height / box.height;
  };
  svg.addEventListener("mouseleave", hide);
  svg.addEventListener("mousemove", (event) => {
    const step = stepAt(event);
    if (step === null) hide();
    else point(step, event.clientX, event.clientY);
  });
  if (chart.axis !== "step" || !steps.length || !showPlays) {
    svg.setAttribute("role", "img");
    return;
  }
  svg.classList.add("opens");
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("role", "button");
  svg.addEventListener("blur", hide);
  svg.addEventListener("click", (event) => {
    const step = stepAt(event);
    if (step !== null) showPlays(kindAt(chart, step, height(event)), step);
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      event.preventDefault();
      const next = at === null ? steps.length - 1 : steps.indexOf(at) + move;
      const step = steps[Math.min(Math.max(next, 0), steps.length - 1)];
      const box = svg.getBoundingClientRect();
      point(step, box.left + place(step) * box.width / svg.viewBox.baseVal.width, box.top);
    } else if (event.key === "Enter" && at !== null) {
      event.preventDefault();
      // The last series is drawn on top: it is the one the chart is about.
      showPlays(kindAt(chart, at, chart.series.at(-1).at[0]), at);
    } else if (event.key === "Escape") hide();
  });
}
