// Small helpers to make elements.

export const at = (id) => document.getElementById(id);

// make("td", { class: "x", text: "y", onclick: f }, child, ...)
export function make(name, properties = {}, ...children) {
  const node = name.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4))
    : document.createElement(name);
  for (const [own, value] of Object.entries(properties)) {
    if (own === "text") node.textContent = value;
    else if (own.startsWith("on")) node.addEventListener(own.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(own, value);
  }
  node.append(...children);
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children);
}

// A token as people can see it.
export function shown(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "·");
}

export const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : `${(100 * p).toPrecision(2)} %`);
