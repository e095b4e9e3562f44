// A table that draws only the rows that can be seen, and those again only when they change: five
// thousand rows cost what forty do.
import { element } from "./dom.js";

const ROW_PX = 40;
const BEYOND = 8;

export class List {
  // columns: [{title, width, number, value(row), cell(row)}]; value sorts, cell draws.
  constructor(holder, { label, columns, key, sort = 0 }) {
    this.holder = holder;
    this.columns = columns;
    this.key = key;
    this.rows = [];
    this.shown = new Map();
    this.sorted = { column: sort, down: false };
    this.body = element("tbody");
    this.above = this.#space();
    this.below = this.#space();
    this.body.append(this.above, this.below);
    this.heads = columns.map((column, index) => this.#head(column, index));
    this.table = element("table", { "aria-label": label }, element("thead", {}, element("tr", {}, ...this.heads)), this.body);
    this.scroll = element("div", { class: "list-scroll", tabindex: "0", role: "region", "aria-label": label }, this.table);
    this.empty = element("p", { class: "empty" }, "Waiting for the first rows …");
    this.scroll.hidden = true;
    holder.replaceChildren(this.scroll, this.empty);
    this.scroll.addEventListener("scroll", () => this.#later(), { passive: true });
    this.scroll.addEventListener("keydown", (event) => this.#move(event));
    new ResizeObserver(() => this.#later()).observe(this.scroll);
  }

  // Every row, in any order; those that are the same object as before are not drawn again.
  show(rows) {
    this.rows = rows;
    this.#sort();
    this.scroll.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
    this.empty.textContent = this.holder.dataset.empty;
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.#draw();
  }

  #sort() {
    const { column, down } = this.sorted;
    const value = this.columns[column].value;
    const sign = down ? -1 : 1;
    const compare = (a, b) => (a < b ? -sign : a > b ? sign : 0);
    this.rows.sort((a, b) => compare(value(a), value(b)) || (this.key(a) < this.key(b) ? -1 : 1));
    this.heads.forEach((head, index) => {
      if (index === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  #head(column, index) {
    const head = element("th", { scope: "col", ...(column.number ? { class: "number" } : {}) });
    if (column.width) head.style.width = column.width;
    if (!column.value) { head.append(element("span", { class: "sr" }, column.title)); return head; }
    const button = element("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      const same = this.sorted.column === index;
      this.sorted = { column: index, down: same ? !this.sorted.down : Boolean(column.number) };
      this.#sort();
      this.#draw();
    });
    head.append(button);
    return head;
  }

  #space() {
    const cell = element("td", { colspan: this.columns.length });
    return element("tr", { class: "space", "aria-hidden": "true" }, cell);
  }

  #later() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.#draw(); });
  }

  #draw() {
    const height = this.scroll.clientHeight || 600;
    const first = Math.max(0, Math.floor(this.scroll.scrollTop / ROW_PX) - BEYOND);
    const last = Math.min(this.rows.length, first + Math.ceil(height / ROW_PX) + 2 * BEYOND);
    const wanted = this.rows.slice(first, last);
    const kept = new Map();
    let after = this.above;
    wanted.forEach((row, index) => {
      const key = this.key(row);
      const before = this.shown.get(key);
      let line = before?.line;
      if (!before || before.row !== row) {
        const cells = this.columns.map((column, at) => {
          const cell = element(at === 0 ? "th" : "td", at === 0 ? { scope: "row" } : {}, column.cell(row));
          if (column.number) cell.className = "number";
          return cell;
        });
        // A line that has the focus keeps it: its cells change, it stays.
        const focused = line?.contains(document.activeElement) ? focusOf(line) : null;
        line ??= element("tr", { class: "row" });
        line.replaceChildren(...cells);
        if (focused !== null) line.querySelectorAll("a, button")[focused]?.focus({ preventScroll: true });
      }
      line.setAttribute("aria-rowindex", first + index + 2);
      kept.set(key, { row, line });
      if (after.nextSibling !== line) after.after(line);
      after = line;
    });
    for (const [key, { line }] of this.shown) if (!kept.has(key)) line.remove();
    this.shown = kept;
    this.above.firstChild.style.height = `${first * ROW_PX}px`;
    this.below.firstChild.style.height = `${(this.rows.length - last) * ROW_PX}px`;
  }

  #move(event) {
    const pages = { PageDown: this.scroll.clientHeight - 2 * ROW_PX, PageUp: 2 * ROW_PX - this.scroll.clientHeight, ArrowDown: ROW_PX, ArrowUp: -ROW_PX };
    if (event.target !== this.scroll) return;
    if (event.key in pages) this.scroll.scrollBy({ top: pages[event.key] });
    else if (event.key === "Home") this.scroll.scrollTo({ top: 0 });
    else if (event.key === "End") this.scroll.scrollTo({ top: this.rows.length * ROW_PX });
    else return;
    event.preventDefault();
  }
}

function focusOf(line) {
  return [...line.querySelectorAll("a, button")].indexOf(document.activeElement);
}
