// Elements without markup in strings: what a model's name holds is never HTML.
const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

export function pill(state, reason = "") {
  return element("span", { class: `pill pill-${state}`, ...(reason ? { title: reason } : {}) }, state);
}

// A bar of shares: [{size, kind, title}] of a whole.
export function bar(shares, whole, label) {
  const svg = drawn("svg", { class: "bar", role: "img", "aria-label": label });
  svg.append(drawn("rect", { class: "bar-ground", width: "100%", height: "100%" }));
  let at = 0;
  for (const share of shares) {
    const width = whole ? (100 * share.size) / whole : 0;
    const rect = drawn("rect", { class: share.kind, x: `${at}%`, width: `${width}%`, height: "100%" });
    rect.append(drawn("title", {}, share.title));
    svg.append(rect);
    at += width;
  }
  return svg;
}

// The same name has the same colour on every page.
export function segment(name) {
  let hash = 0;
  for (const letter of name) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
  return name ? `seg-${(hash % 8) + 1}` : "seg-rest";
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
