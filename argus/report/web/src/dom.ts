// Elements. Text is text: nothing here takes markup.

import { harmless } from "./units.ts";

export type Child = Node | string | number | null | undefined | false;
type Attributes = Record<string, string | number | boolean | null | undefined | EventListener>;

/** An element with attributes (`onclick` and so on are listeners) and children. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: (Child | Child[])[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : harmless(value));
  }
  add(element, ...children);
  return element;
}

export function add(parent: Node, ...children: (Child | Child[])[]): void {
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    parent.appendChild(child instanceof Node ? child : document.createTextNode(harmless(child)));
  }
}

export function clear(element: Element, ...children: (Child | Child[])[]): void {
  element.replaceChildren();
  add(element, ...children);
}

let ids = 0;

/** An id that no other element has. */
export function newId(word: string): string {
  return `${word}-${++ids}`;
}

/** A folded part. `key`: the same in a later version of the page, which keeps it open. */
export function folded(title: string, key: string, ...children: (Child | Child[])[]): HTMLDetailsElement {
  return h("details", { "data-key": key }, h("summary", {}, title), ...children);
}

/** Calls back before the element's next picture, whatever asked how often. */
export function onceAFrame(work: () => void): () => void {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

/** A query with a button that copies it. */
export function query(text: string): HTMLElement {
  const code = h("code", {}, text);
  const button = h("button", { type: "button", class: "copy" }, "Copy");
  button.addEventListener("click", async () => {
    let copied = false;
    try {
      await navigator.clipboard.writeText(text);
      copied = true;
    } catch {
      // A page that was opened from disk may not be allowed to: then what is selected is copied.
      getSelection()?.selectAllChildren(code);
      copied = document.execCommand("copy");
    }
    button.textContent = copied ? "Copied" : "Press Ctrl+C";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return h("div", { class: "query" }, button, h("pre", { tabindex: 0, "aria-label": "SQL" }, code));
}
