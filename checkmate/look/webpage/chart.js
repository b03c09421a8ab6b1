// Pictures: uPlot in areas of the page, in the page's letters and colours, with what is painted and marked upon it.

const FONT = "13px system-ui, sans-serif";
const ROUND = Array.from({ length: 32 }, (_, i) => i - 16).flatMap((power) => [1, 2, 5].map((n) => Number(`${n}e${power}`)));
const WHOLE = ROUND.filter((n) => n >= 1);
const BYTE_UNITS = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];
const SECOND_UNITS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const BARE = { paths: () => null, points: { show: false } }; // a series that is not drawn

/** Words for the numbers on an axis: all in the unit of the largest, with the decimals that tell them apart. */
function inUnits(units) {
  return (_, numbers, __, ___, step) => {
    const most = Math.max(...numbers.map(Math.abs));
    const [size, unit] = units.find(([least]) => most >= least) ?? units[units.length - 1];
    const decimals = Math.min(12, Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9)));
    return numbers.map((n) => (n === null ? "" : `${(n / size).toFixed(decimals)} ${unit}`));
  };
}

/** Words for whole numbers from 0 that are counted from so many. */
function countedFrom(first) {
  return (_, numbers) => numbers.map((n) => (n === null ? "" : String(n + first)));
}

/** The numbers along an axis, null for those so near to the right end that their words would be cut. */
function withRoom(u, numbers) {
  const { min, max } = u.scales.x;
  return numbers.map((n) => (n > max - (max - min) * 12 / u.width ? null : n));
}

/**
 * A picture in an area, drawn again whenever its size or the colours change. Beside options of uPlot, whose two axes and
 * series are these: paint(pen, width, height) paints upon it, in pixels of the page from the plot's upper left corner;
 * point(x, y) hears where the pointer is in the plot, in units of the axes; keys says what each key does; zooms: whether
 * dragging does.
 * Gives the chart, box(left, right, low, high) in pixels, and frame(left, right, low, high) to mark what is shown.
 */
function chart(area, { axes: [across, up], columns, series = [{}, BARE], paint, point, keys = {}, zooms = false, ...options }) {
  const look = { font: FONT, labelFont: FONT, stroke: () => colour("soft"), ticks: { show: false }, incrs: ROUND, labelSize: 18,
    labelGap: 0 };
  const mark = el("div", { class: "mark" });
  let framed = null;
  const u = new uPlot({
    ...options, width: 300, height: 300, legend: { show: false }, series,
    cursor: { x: false, y: false, points: { show: false }, drag: { x: zooms } },
    axes: [
      { ...look, size: 20, gap: 5, space: 90, grid: { show: false }, filter: withRoom, ...across },
      { ...look, size: 74, gap: 6, space: 40, grid: { stroke: () => colour("faint"), width: 1 }, ...up },
    ],
    hooks: { draw: [draw] },
  }, columns, area);
  u.ctx.canvas.setAttribute("aria-hidden", "true");
  u.over.append(mark);

  function box(...ends) {
    const [a, b, c, d] = ends.map((end, i) => u.valToPos(end, i < 2 ? "x" : "y"));
    return [Math.min(a, b), Math.min(c, d), Math.abs(b - a), Math.abs(d - c)];
  }

  function draw() {
    const [left, top, width, height] = ["left", "top", "width", "height"].map((side) => u.bbox[side] / uPlot.pxRatio);
    u.ctx.save();
    u.ctx.scale(uPlot.pxRatio, uPlot.pxRatio);
    u.ctx.translate(left, top);
    u.ctx.font = FONT;
    u.ctx.setLineDash([]);
    paint(u.ctx, width, height);
    u.ctx.restore();
    if (framed) frame(...framed);
  }

  /** Puts the mark around what is shown, which can be too small to see. */
  function frame(...ends) {
    framed = ends;
    const [left, top, width, height] = box(...ends);
    const [wide, high] = [Math.max(6, width), Math.max(6, height)];
    const at = { left: left - (wide - width) / 2, top: top - (high - height) / 2, width: wide, height: high };
    for (const [name, pixels] of Object.entries(at)) mark.style[name] = `${pixels}px`;
  }

  area.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key] || keys[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
  for (const moved of ["pointermove", "pointerdown"]) area.addEventListener(moved, (event) => {
    const { left, top, width, height } = u.over.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    if (x >= 0 && y >= 0 && x < width && y < height) point(u.posToVal(x, "x"), u.posToVal(y, "y"));
  });
  kept(area, () => {
    if (!area.clientWidth) return; // it has no place yet
    u.setSize({ width: area.clientWidth, height: area.clientHeight });
    u.redraw(false, true);
  });
  return { u, box, frame };
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

/** Text on a patch of paper, shortened until it fits. */
function patch(pen, text, x, y, room) {
  let shown = text;
  for (let n = text.length; n && pen.measureText(shown).width > room; n = Math.floor(0.95 * n)) shown = text.slice(0, n) + "…";
  pen.fillStyle = colour("paper");
  pen.fillRect(x - 3, y - 9, pen.measureText(shown).width + 6, 18);
  Object.assign(pen, { fillStyle: colour("ink"), textBaseline: "middle", textAlign: "left" });
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

const HATCHES = { // of a tile of 8 by 8
  "/": "M-2 2L2 -2M-2 10L10 -2M6 10L10 6", "\\": "M-2 6L2 10M-2 -2L10 10M6 -2L10 2",
  "-": "M0 4H8", "|": "M4 0V8", ".": "M2 2h.01M6 6h.01",
};
HATCHES.x = HATCHES["/"] + HATCHES["\\"];

/** The fill of a role with its hatch as a pattern: what colours tell apart, hatches do too. */
function hatch(pen, { fill, hatch: [sign, ...more], ink = "rgba(0, 0, 0, 0.75)" }, sharp) {
  const tile = el("canvas", { width: 8 * sharp, height: 8 * sharp });
  const into = tile.getContext("2d");
  into.scale(sharp, sharp);
  into.fillStyle = fill;
  into.fillRect(0, 0, 8, 8);
  const wide = more.length > 1 ? 1.5 : 0.8;
  Object.assign(into, { strokeStyle: ink, lineCap: "round", lineWidth: sign === "." ? 1.6 * wide : wide });
  if (sign) into.stroke(new Path2D(HATCHES[sign]));
  return pen.createPattern(tile, "repeat");
}

/** A sample for a legend, 32 by 18 pixels of the page, each of them two by two. */
function swatch(paint) {
  const canvas = el("canvas", { width: "64", height: "36", "aria-hidden": "true" });
  paint(canvas.getContext("2d"));
  return canvas;
}

/** A sample of a fill with its hatch. */
function filled(role) {
  return swatch((pen) => {
    pen.fillStyle = hatch(pen, role, 2);
    pen.fillRect(0, 0, 64, 36);
  });
}
