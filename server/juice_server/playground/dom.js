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

// A table; each row is a list of texts and elements. One that has a label may be too large for its
// place: then it scrolls, by keys, too.
export function table(names, rows, label) {
  const cell = (name, own, properties) =>
    own instanceof Node ? make(name, properties, own) : make(name, { ...properties, text: own });
  const head = make("tr", {}, ...names.map((own) => (own ? make("th", { scope: "col", text: own }) : make("td"))));
  const body = rows.map(([first, ...others]) =>
    make("tr", {}, cell("th", first, { scope: "row" }), ...others.map((own) => cell("td", own, {}))),
  );
  const whole = make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
  return label ? make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, whole) : whole;
}

// A bar of a share of its cell. The page's policy allows no style in its text; a property is none.
export function bar(share, kind = "") {
  const own = make("span", { class: `bar ${kind}`, "aria-hidden": "true" });
  own.style.width = `${Math.max(1, 100 * share)}%`;
  return own;
}

// A token as people can see it.
export function shown(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "·");
}

export function percent(p) {
  if (p > 0 && p < 1e-4) return "< 0.01 %";
  return p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : `${(100 * p).toPrecision(2)} %`;
}
