// Tables that sort by their heads. A cell is its text, or its text and the number or text that it sorts by.

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

/** What each op costs, the most seconds first; and of those that run again, what that takes. */
function opTables() {
  const made = new Float64Array(T);
  data.values.producer.forEach((k, v) => {
    if (k !== null) made[k] += data.values.bytes[v];
  });
  const stages = Array.from({ length: T }, () => []);
  for (const i of step.again) stages[data.moments.op[i]].push(i);
  const spent = (k) => step.runs[k] * data.ops.seconds[k];
  const total = step.begin[N];
  const byCost = Array.from({ length: T }, (_, k) => k).sort((a, b) => spent(b) - spent(a) || a - b);
  const name = (k) => [data.ops.name[k], data.ops.name[k]];
  const seconds = (s) => [formatSeconds(s), s];
  const place = (k) => whereOf(k)[3];
  const costs = {
    id: "table-ops", title: `Ops by cost (${T})`, go: byCost.map((k) => step.first[k]),
    heads: [["op"], ["computes"], ["of the"], ["runs", true], ["each", true], ["in all", true], ["share", true],
      ["makes", true], ["workspace", true], ["where"]],
    rows: byCost.map((k) => [
      name(k), data.targets[data.ops.target[k]], phaseOf(k), [String(step.runs[k]), step.runs[k]],
      seconds(data.ops.seconds[k]), seconds(spent(k)),
      [total > 0 ? fixed(100 * spent(k) / total, 2) + "%" : "", spent(k)],
      [formatBytes(made[k]), made[k]], [formatBytes(data.ops.workspace[k]), data.ops.workspace[k]], place(k)]),
  };
  const twice = byCost.filter((k) => stages[k].length);
  const extra = (k) => stages[k].length * data.ops.seconds[k];
  twice.sort((a, b) => extra(b) - extra(a) || a - b);
  const again = {
    id: "table-again", title: `What is run again (${twice.length} ops)`, go: twice.map((k) => stages[k][0]),
    heads: [["op"], ["computes"], ["times more", true], ["costs", true], ["makes", true], ["before"], ["where"]],
    rows: twice.map((k) => [
      name(k), data.targets[data.ops.target[k]], [String(stages[k].length), stages[k].length], seconds(extra(k)),
      [formatBytes(made[k]), made[k]],
      [stages[k].map((i) => data.ops.name[step.stage[i]]).join(", "), step.stage[stages[k][0]]], place(k)]),
  };
  return [costs, again];
}

{
  const [costs, again] = opTables();
  const place = document.getElementById("all-tables");
  const [peak, ...others] = data.tables;
  place.append(sortableTable(peak));
  place.append(again.rows.length ? sortableTable(again) : el("p", {}, "No op runs again."));
  place.append(...others.filter((t) => t.id !== "table-frontier").map(sortableTable), sortableTable(costs));
}
