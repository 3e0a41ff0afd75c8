// Elements are made of properties and text, so the text of a trajectory is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function byId(name) {
  return document.getElementById(name);
}

function createElement(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function createSvg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Make an SVG element act like a button, for the mouse and for the keyboard.
function makeButton(node, label, act) {
  node.setAttribute("role", "button");
  node.setAttribute("tabindex", "0");
  node.setAttribute("aria-label", label);
  node.append(createSvg("title", {}, label));
  node.addEventListener("click", act);
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    act();
  });
  return node;
}
