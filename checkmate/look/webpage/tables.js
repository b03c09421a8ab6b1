// Tables that sort by their heads. A cell is [its text], or [its text, the number that it sorts by].

const FEW = 20; // rows shown before one asks for all

/** By numbers or by text; what has no number (null) last, whichever way. */
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

function rowOf(cells, heads, go) {
  return el("tr", {}, ...cells.map(([text], c) => {
    const attributes = { class: heads[c][1] ? "number" : text.length > 30 && text.includes(" ") ? "long" : null };
    if (c > 0) return el("td", attributes, text);
    return el("th", { ...attributes, scope: "row" }, go == null ? text : button(text, () => memory.go(go)));
  }));
}

/** A table with this body. In its heads stand their texts, or what is given for these. */
function table(title, heads, body, shown = heads.map(([text]) => text)) {
  const columns = heads.map(([, number], c) => el("th", { scope: "col", class: number ? "number" : null }, shown[c]));
  return el("table", {}, el("caption", {}, title), el("thead", {}, el("tr", {}, ...columns)), body);
}

/** heads: [text, whether numbers]; go: for each row the moment that its name leads to, or null. */
function sortableTable({ id, title, heads, rows, go }) {
  const found = rows.map((cells, i) => ({ cells, go: go ? go[i] : null })); // each gets its element when first shown
  const body = el("tbody");
  const status = el("p", { class: "unseen", role: "status" });
  const shown = table(title, heads, body, heads.map(([text], c) => button(text, () => sort(c))));
  const columns = [...shown.tHead.rows[0].cells];
  const filter = el("input", { type: "search", id: id + "-filter", autocomplete: "off" });
  const more = button("", () => {
    all = !all;
    fill();
  });
  let all = false;
  let sorted = { column: -1, sign: 1 };

  function fill() {
    const word = filter.value.trim().toLowerCase();
    const fitting = word ? found.filter(({ cells }) => cells.some(([text]) => text.toLowerCase().includes(word))) : found;
    const seen = all ? fitting : fitting.slice(0, FEW);
    body.replaceChildren(...seen.map((row) => (row.element ??= rowOf(row.cells, heads, row.go))));
    more.textContent = all ? `Show the first ${FEW}` : `Show all ${fitting.length}`;
    more.hidden = fitting.length <= FEW;
    if (word) status.textContent = `${fitting.length} of ${found.length} rows`;
  }

  function sort(c) {
    const begin = heads[c][1] ? -1 : 1; // numbers: the largest first
    sorted = { column: c, sign: sorted.column === c ? -sorted.sign : begin };
    found.sort((a, b) => compare(a.cells[c].at(-1), b.cells[c].at(-1), sorted.sign));
    columns.forEach((head) => head.removeAttribute("aria-sort"));
    columns[c].setAttribute("aria-sort", sorted.sign > 0 ? "ascending" : "descending");
    status.textContent = `Sorted by ${heads[c][0]}, ${sorted.sign > 0 ? "ascending" : "descending"}`;
    fill();
  }

  filter.addEventListener("input", fill);
  fill();
  const controls = rows.length > FEW ? [el("label", { for: filter.id }, "Filter:"), filter, more] : [];
  return el("div", { class: "table", id },
    el("div", { class: "wide", role: "region", tabindex: "0", "aria-label": title }, shown),
    el("div", { class: "controls" }, ...controls), status);
}

{
  const place = document.getElementById("all-tables");
  const [peak, ...others] = data.tables.filter((table) => table.id !== "table-frontier");
  place.append(sortableTable(peak), ...(again.length ? [] : [el("p", {}, "No op runs again.")]), ...others.map(sortableTable));
}
