// The three views as tabs: arrow keys go from one to the next.

import { at } from "./dom.js";

export const VIEWS = ["compare", "dial", "heads"];
let view = VIEWS[0];
let opened = () => {};

export const current = () => view;

export function select(name, focus = false) {
  view = name;
  for (const own of VIEWS) {
    const tab = at(`tab-${own}`);
    tab.setAttribute("aria-selected", String(own === name));
    tab.tabIndex = own === name ? 0 : -1;
    at(own).hidden = own !== name;
    if (own === name && focus) tab.focus();
  }
  opened(name);
}

export function listen(onOpen) {
  opened = onOpen;
  for (const own of VIEWS) {
    at(`tab-${own}`).addEventListener("click", () => select(own));
    at(`tab-${own}`).addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      select(VIEWS[(VIEWS.indexOf(own) + step + VIEWS.length) % VIEWS.length], true);
    });
  }
}
