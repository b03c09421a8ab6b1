"use strict";

// What all pictures and tables of the page use. Text from the plan enters the page as text nodes only, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const N = data.moments.op.length; // executions, in order: "moments"
const T = data.ops.name.length;
for (const column of [data.values.name, ...["name", "target", "module", "line", "where"].map((name) => data.ops[name])]) {
  column.forEach((i, k) => {
    column[k] = data.texts[i];
  });
}
for (const table of data.tables) {
  table.rows = table.rows.map((row) => row.map((cell) => (Array.isArray(cell) ? [data.texts[cell[0]], cell[1]] : data.texts[cell])));
}
const again = data.moments.nth.flatMap((nth, i) => (nth ? [i] : [])); // moments at which an op runs again

/** That a moment writes over a value; empty where it writes over none. */
function runsOver(i) {
  const over = data.texts[data.moments.over[i]];
  return over ? `, over ${over}` : "";
}

/** Whose place something is in, by the index of that name. */
function inPlace(text) {
  return data.texts[text] ? `, in place of ${data.texts[text]}` : "";
}

/** A text in parts between which a line may end: long names have no spaces, but underscores. */
function broken(text) {
  const parts = text.split(/(?<=\w_)(?=[^_])/);
  return parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part]));
}

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flatMap((child) => (typeof child === "string" ? broken(child) : [child])));
  return element;
}

function button(text, act) {
  return el("button", { type: "button", onclick: act }, text);
}

/** A list of facts; those without words are left out. */
function facts(pairs) {
  const known = pairs.filter(([, text]) => text !== "");
  return el("dl", { class: "facts" }, ...known.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
}

function colour(name) {
  return getComputedStyle(root).getPropertyValue("--" + name).trim();
}

function formatBytes(count) {
  return data.written[count];
}

/** Round numbers from low to high, about so many. */
function ticks(low, high, about) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(span / about));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => span / n <= about) || 10 * power;
  const all = [];
  for (let i = Math.ceil(low / step); i * step <= high + span * 1e-9; i++) all.push(i * step);
  return all;
}

/** Ticks with words that tell them apart: all in the unit of the largest. */
function labelled(values, units) {
  const most = Math.max(...values.map(Math.abs));
  const [scale, unit] = units.find(([size]) => most >= size) || units[units.length - 1];
  const steps = values.slice(1).map((v, i) => (v - values[i]) / scale);
  const smallest = steps.length ? Math.min(...steps) : most / scale || 1;
  const decimals = Math.min(12, Math.max(0, Math.ceil(-Math.log10(smallest) - 1e-9)));
  return values.map((v) => [v, (v / scale).toFixed(decimals) + " " + unit]);
}

const BYTE_UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const SECOND_UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];

/** The canvas's context, cleared, with one unit for each pixel of the page. */
function cleared(canvas) {
  const box = canvas.parentElement.getBoundingClientRect();
  const sharp = Math.min(3, window.devicePixelRatio || 1);
  const width = Math.max(1, Math.round(box.width * sharp));
  const height = Math.max(1, Math.round(box.height * sharp));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d");
  pen.setTransform(sharp, 0, 0, sharp, 0, 0);
  pen.clearRect(0, 0, box.width, box.height);
  pen.font = "13px system-ui, sans-serif";
  return { pen, width: box.width, height: box.height };
}

/** Text on a patch of paper, shortened until it fits. */
function patch(pen, text, x, y, room) {
  let shown = text;
  if (pen.measureText(shown).width > room) {
    let [fits, not] = [0, shown.length];
    while (not - fits > 1) {
      const middle = (fits + not) >> 1;
      if (pen.measureText(text.slice(0, middle) + "…").width > room) not = middle;
      else fits = middle;
    }
    shown = text.slice(0, fits) + "…";
  }
  const width = pen.measureText(shown).width;
  pen.fillStyle = colour("paper");
  pen.fillRect(x - 3, y - 9, width + 6, 18);
  pen.fillStyle = colour("ink");
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.fillText(shown, x, y);
}

/** A line through these points, in pixels of the page. */
function stroke(pen, ink, wide, dash, ...points) {
  pen.strokeStyle = colour(ink);
  pen.lineWidth = wide;
  pen.setLineDash(dash);
  pen.beginPath();
  for (const point of points) pen.lineTo(...point);
  pen.stroke();
  pen.setLineDash([]);
}

const HATCH_PATHS = { // of a tile of 8 by 8
  "/": [[-2, 2, 2, -2], [-2, 10, 10, -2], [6, 10, 10, 6]],
  "\\": [[-2, 6, 2, 10], [-2, -2, 10, 10], [6, -2, 10, 2]],
  "-": [[0, 4, 8, 4]],
  "|": [[4, 0, 4, 8]],
};
HATCH_PATHS.x = [...HATCH_PATHS["/"], ...HATCH_PATHS["\\"]];

/** The fill of a role with its hatch as a pattern: what colours tell apart, hatches do too. */
function hatch(pen, { fill, hatch: word }, sharp) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8 * sharp;
  const ink = tile.getContext("2d");
  ink.scale(sharp, sharp);
  ink.fillStyle = fill;
  ink.fillRect(0, 0, 8, 8);
  ink.strokeStyle = ink.fillStyle = "rgba(0, 0, 0, 0.75)";
  ink.lineWidth = word.length > 2 ? 1.5 : 0.8;
  const radius = word.length > 2 ? 1.1 : 0.8;
  if (word[0] === ".") for (const [x, y] of [[2, 2], [6, 6]]) {
    ink.beginPath();
    ink.arc(x, y, radius, 0, 7);
    ink.fill();
  }
  for (const [a, b, c, d] of HATCH_PATHS[word[0]] || []) {
    ink.beginPath();
    ink.moveTo(a, b);
    ink.lineTo(c, d);
    ink.stroke();
  }
  return pen.createPattern(tile, "repeat");
}

/** What keys do in a picture, and what pointing at it does. */
function controlled(area, keys, point) {
  area.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key] || keys[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
  for (const moved of ["pointermove", "pointerdown"]) area.addEventListener(moved, point);
}

/** Draws now, and again whenever its size or the colours change. */
function kept(element, draw) {
  new ResizeObserver(draw).observe(element);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
    addEventListener(event, () => {
      root.classList.toggle("printing", printing);
      draw();
    });
  }
  draw();
}
