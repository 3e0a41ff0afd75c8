"use strict";
const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");
root.dataset.theme = dark.matches ? "dark" : "light";
dark.addEventListener("change", (event) => { root.dataset.theme = event.matches ? "dark" : "light"; });
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
});

const tip = document.getElementById("tip");
const space = "http://www.w3.org/2000/svg";

function nearest(xs, value) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (Math.abs(xs[i] - value) < Math.abs(xs[best] - value)) best = i;
  return best;
}

function row(series, index) {
  const line = document.createElement("div");
  line.append(Object.assign(document.createElement("i"), { className: "c-" + series.color }));
  line.append(series.y[index] + " ");
  const name = series.range ? series.name.split(",")[0] + " (" + series.range[index] + ")" : series.name;
  line.append(Object.assign(document.createElement("span"), { textContent: name }));
  return line;
}

for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const chart = JSON.parse(svg.dataset.hover);
  const cursor = document.createElementNS(space, "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y1", chart.top);
  cursor.setAttribute("y2", chart.bottom);
  cursor.setAttribute("visibility", "hidden");
  svg.append(cursor);
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  svg.addEventListener("mouseleave", hide);
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const pixel = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const share = (pixel - chart.left) / (chart.right - chart.left);
    const all = [...new Set(chart.series.flatMap((series) => series.x))];
    if (share < -0.02 || share > 1.02 || !all.length) return hide();
    const step = all[nearest(all, chart.low + share * (chart.high - chart.low))];
    const place = chart.left + (chart.right - chart.left) * (step - chart.low) / (chart.high - chart.low);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: chart.axis + " " + step }));
    for (const series of [...chart.series].reverse()) {
      const index = series.x.indexOf(step);
      if (index >= 0) tip.append(row(series, index));
    }
    tip.hidden = false;
    const right = event.clientX + 16 + tip.offsetWidth < window.innerWidth;
    tip.style.left = (right ? event.clientX + 16 : event.clientX - 16 - tip.offsetWidth) + "px";
    tip.style.top = Math.min(event.clientY + 12, window.innerHeight - tip.offsetHeight - 8) + "px";
  });
}
