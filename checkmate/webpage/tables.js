// Tables that sort by their heads. A cell is its text, or its text and the number that it sorts by.

const FEW = 20; // rows shown before one asks for all

function textOf(cell) {
  return Array.isArray(cell) ? cell[0] : cell;
}

function keyOf(cell) {
  return Array.isArray(cell) ? cell[1] : cell;
}

/** By numbers or by text; what has no number (null) last, whichever way. */
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

function rowOf(cells, heads, go) {
  return el("tr", {}, ...cells.map((cell, c) => {
    const text = textOf(cell);
    const attributes = { class: heads[c][1] ? "number" : text.length > 30 && text.includes(" ") ? "long" : null };
    if (c > 0) return el("td", attributes, text);
    return el("th", { ...attributes, scope: "row" }, go == null ? text : button(text, () => memory.go(go)));
  }));
}

function plainTable(title, heads, rows) {
  return el("table", {},
    el("caption", {}, title),
    el("thead", {}, el("tr", {}, ...heads.map(([text, number]) => el("th", { scope: "col", class: number ? "number" : null }, text)))),
    el("tbody", {}, ...rows.map((cells) => rowOf(cells, heads, null))));
}

/** heads: [text, whether numbers]; go: for each row the moment that its name leads to, or null. */
function sortableTable({ id, title, heads, rows, go }) {
  const found = rows.map((cells, i) => ({ cells, go: go ? go[i] : null })); // each gets its element when first shown
  const body = el("tbody");
  const status = el("p", { class: "unseen", role: "status" });
  const columns = heads.map(([text, number], c) =>
    el("th", { scope: "col", class: number ? "number" : null }, button(text, () => sort(c))));
  const filter = el("input", { type: "search", id: id + "-filter", autocomplete: "off" });
  const more = button("", () => {
    all = !all;
    fill();
  });
  let all = false;
  let sorted = { column: -1, sign: 1 };

  function fill() {
    const word = filter.value.trim().toLowerCase();
    const fitting = word ? found.filter(({ cells }) => cells.some((c) => textOf(c).toLowerCase().includes(word))) : found;
    const shown = all ? fitting : fitting.slice(0, FEW);
    body.replaceChildren(...shown.map((row) => (row.element ??= rowOf(row.cells, heads, row.go))));
    more.textContent = all ? `Show the first ${FEW}` : `Show all ${fitting.length}`;
    more.hidden = fitting.length <= FEW;
    if (word) status.textContent = `${fitting.length} of ${found.length} rows`;
  }

  function sort(c) {
    const begin = heads[c][1] ? -1 : 1; // numbers: the largest first
    sorted = { column: c, sign: sorted.column === c ? -sorted.sign : begin };
    found.sort((a, b) => compare(keyOf(a.cells[c]), keyOf(b.cells[c]), sorted.sign));
    columns.forEach((head) => head.removeAttribute("aria-sort"));
    columns[c].setAttribute("aria-sort", sorted.sign > 0 ? "ascending" : "descending");
    status.textContent = `Sorted by ${heads[c][0]}, ${sorted.sign > 0 ? "ascending" : "descending"}`;
    fill();
  }

  filter.addEventListener("input", fill);
  fill();
  const controls = rows.length > FEW
    ? [el("label", { for: filter.id }, "Filter:"), filter, more]
    : [];
  return el("div", { class: "table", id },
    el("div", { class: "wide", role: "region", tabindex: "0", "aria-label": title },
      el("table", {}, el("caption", {}, title), el("thead", {}, el("tr", {}, ...columns)), body)),
    el("div", { class: "controls" }, ...controls), status);
}

{
  const place = document.getElementById("all-tables");
  const [peak, ...others] = data.tables.filter((table) => table.id !== "table-frontier");
  place.append(sortableTable(peak), ...(again.length ? [] : [el("p", {}, "No op runs again.")]), ...others.map(sortableTable));
}
