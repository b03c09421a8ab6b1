// Bytes at hand over the step as stacked areas (uPlot draws them); the pointer and the keyboard move from op to op.

const memory = (() => {
  const area = el("div", {
    id: "memory-area", class: "picture", role: "slider", tabindex: "0", "aria-label": "Op of the step",
    "aria-describedby": "memory-text memory-keys", "aria-valuemin": "1", "aria-valuemax": String(N),
  });
  const scale = el("select", { id: "memory-scale" }, el("option", { value: "time" }, "by time"),
    el("option", { value: "ops" }, "op by op"));
  const legend = el("ul", { class: "legend", "aria-label": "Bytes by role at the op shown" });
  const readout = el("div", { id: "memory-readout", class: "readout", role: "region", tabindex: "0",
    "aria-label": "The op shown" });
  const values = el("div", { class: "values", role: "region", tabindex: "0", "aria-label": "Values alive" });

  const time = data.moments.begin; // where each moment begins, and the last one ends
  const counted = Array.from({ length: N + 1 }, (_, i) => i);
  if (!(time[N] > 0)) scale.value = "ops";
  let xs = time[N] > 0 ? time : counted;
  let current = data.peak.moment;
  const beyond = data.budget.bytes > 1.5 * data.peak.bytes;
  const ceiling = Math.max(1, data.peak.bytes, beyond ? 0 : data.budget.bytes) * 1.3;

  /** Where moments begin; the tops of the areas, the highest first, so that the lower are drawn upon it; the outline. */
  function columns() {
    const sums = new Array(N + 1).fill(0);
    const tops = data.roles.map((role) => sums.map((_, i) => (sums[i] += role.bytes[Math.min(i, N - 1)])));
    return [xs, ...tops.reverse(), sums];
  }

  const font = "13px system-ui, sans-serif";
  const axis = { font, labelFont: font, stroke: () => colour("soft"), ticks: { show: false } };
  const steps = { paths: uPlot.paths.stepped({ align: 1 }), points: { show: false } };
  const chart = new uPlot({
    width: 300, height: 416, padding: [30, 14, 0, 0], legend: { show: false },
    cursor: { x: false, y: false, points: { show: false } },
    scales: { x: { time: false }, y: { range: [0, ceiling] } },
    axes: [
      {
        ...axis, size: 22, gap: 5, labelSize: 18, labelGap: 0, grid: { show: false },
        label: () => (xs === time ? "time in the step" : "executions, in order"),
        splits: (u, _, min, max) => {
          const end = max - (max - min) * 12 / u.width; // beyond it there is no room for a text
          const all = ticks(min, max, Math.max(3, u.width / 110)).filter((at) => at <= end);
          return xs === time ? all : all.filter(Number.isInteger);
        },
        values: (_, at) => (xs === time ? labelled(at, SECOND_UNITS).map(([, text]) => text) : at.map((i) => String(i + 1))),
      },
      {
        ...axis, size: 74, gap: 6, grid: { stroke: () => colour("faint"), width: 1 },
        splits: () => ticks(0, ceiling, 6), values: (_, at) => labelled(at, BYTE_UNITS).map(([, text]) => text),
      },
    ],
    series: [
      {},
      ...[...data.roles].reverse().map((role) => ({ ...steps, width: 0, fill: (u) => hatch(u.ctx, role, uPlot.pxRatio) })),
      { ...steps, width: 0.8, stroke: () => colour("ink") },
    ],
    hooks: { draw: [annotate, placeMark] },
  }, columns(), area);
  chart.ctx.canvas.setAttribute("aria-hidden", "true");
  const mark = el("div", { class: "mark" });
  chart.over.append(mark);

  /** Budget, halves and peak, in pixels of the page, upon what is drawn. */
  function annotate(u) {
    const pen = u.ctx;
    const { offsetLeft: left, offsetTop: top, clientWidth: width, clientHeight: height } = u.over;
    const x = (at) => left + u.valToPos(at, "x");
    const y = (bytes) => top + u.valToPos(bytes, "y");
    pen.save();
    pen.scale(uPlot.pxRatio, uPlot.pxRatio);
    pen.font = font;
    for (const draw of [drawHalves, drawBudget, drawPeak]) draw({ pen, x, y, left, top, width, height });
    pen.restore();
  }

  function drawHalves({ pen, x, left, top, width, height }) {
    const border = x(xs[data.moments.boundary]);
    if (!(data.moments.boundary > 0 && data.moments.boundary < N && border > left && border < left + width)) return;
    stroke(pen, "ink", 1, [2, 3], [border, top - 22], [border, top + height]);
    pen.fillStyle = colour("ink");
    pen.textBaseline = "top";
    for (const [half, align, shift] of [["forward", "right", -6], ["backward", "left", 6]]) {
      pen.textAlign = align;
      pen.fillText(half, border + shift, 6);
    }
  }

  function drawBudget({ pen, y, left, top, width }) {
    const level = y(data.budget.bytes);
    if (!beyond) stroke(pen, "ink", 2, [9, 4], [left, level], [left + width, level]);
    const label = data.budget.label + (beyond ? ", above this picture" : "");
    patch(pen, label, left + 8, beyond ? top + 36 : level - 13, width - 12);
  }

  /** A triangle that stands on the peak, and its label. */
  function drawPeak({ pen, x, y, left, top, width }) {
    const i = data.peak.moment;
    const at = x((xs[i] + xs[i + 1]) / 2);
    if (at < left || at > left + width) return;
    const foot = y(data.peak.bytes) - 1;
    stroke(pen, "paper", 1.5, [], [at, foot], [at - 7, foot - 13], [at + 7, foot - 13], [at, foot]);
    pen.fillStyle = colour("mark");
    pen.fill();
    const wide = Math.min(pen.measureText(data.peak.label).width, width - 12);
    const from = at < left + width / 2 ? Math.min(at + 12, left + width - wide - 4) : Math.max(left + 6, at - 12 - wide);
    patch(pen, data.peak.label, from, top + 10, width - 12);
  }

  function placeMark() {
    const [a, b] = [chart.valToPos(xs[current], "x"), chart.valToPos(xs[current + 1], "x")];
    const top = chart.valToPos(data.moments.bytes[current], "y") - 4;
    links?.draw(chart, xs, current);
    Object.assign(mark.style, { left: `${a}px`, width: `${Math.max(2, b - a)}px`, top: `${top}px` });
  }

  /** The roles from the top area to the lowest one, each with its hatch and its bytes at the op shown. */
  function drawLegend() {
    if (!legend.children.length) for (const role of [...data.roles].reverse()) {
      const swatch = el("canvas", { width: "64", height: "36", "aria-hidden": "true" });
      const pen = swatch.getContext("2d");
      pen.fillStyle = hatch(pen, role, 2);
      pen.fillRect(0, 0, 64, 36);
      legend.append(el("li", { "data-role": role.name }, swatch, el("span", {}, role.name),
        el("span", { class: "number" }), el("span", { class: "about" }, role.about)));
    }
    for (const role of data.roles) {
      legend.querySelector(`[data-role="${role.name}"] .number`).textContent = formatBytes(role.bytes[current]);
    }
  }

  function describe(i) {
    const k = data.moments.op[i];
    const times = data.moments.nth[i] ? `, run for the ${data.moments.nth[i]} time` : "";
    return `${data.ops.name[k]}${times}${runsOver(i)}, ${formatBytes(data.moments.bytes[i])} at hand, ${i + 1} of ${N}`;
  }

  function fillReadout(i) {
    const k = data.moments.op[i];
    const here = data.spans.filter(([, , , from, to]) => from <= i && i <= to); // the most bytes first, as all are
    const half = i < data.moments.boundary ? "forward" : "backward";
    const times = data.moments.nth[i] ? `, for the ${data.moments.nth[i]} time` : "";
    const rows = here.slice(0, 100).map(([value, role, copy, , , uses, over]) => {
      const next = uses.find((use) => use > i);
      return [
        data.values.name[value] + (copy ? ` (copy ${copy + 1})` : "") + inPlace(over),
        formatBytes(data.values.bytes[value]),
        data.texts[role],
        next === undefined ? "" : data.ops.name[data.moments.op[next]],
      ];
    });
    readout.replaceChildren(
      el("h3", {}, data.ops.name[k] + (i === data.peak.moment ? " (the peak)" : "")),
      facts([
        ["computes", data.ops.target[k]],
        ["execution", `${i + 1} of ${N}, in the ${half}${times}`],
        ["begins at", data.moments.begins[i]],
        ["takes", data.ops.takes[k]],
        ["at hand", `${formatBytes(data.moments.bytes[i])}, ${here.length} value${here.length === 1 ? "" : "s"}`],
        ["writes over", data.texts[data.moments.over[i]]],
        ["workspace", data.moments.workspace[i] ? formatBytes(data.moments.workspace[i]) : ""],
        ["then waits", data.links?.waits[i] ?? ""],
        ["elsewhere", data.links ? formatBytes(data.links.there[i]) : ""],
        ["module", data.ops.module[k]],
        ["line", data.ops.line[k]],
        ["must run once", data.pinned[k] ?? ""],
      ]),
      values,
    );
    values.replaceChildren(
      plainTable("Values alive" + (here.length > rows.length ? `, the ${rows.length} largest of ${here.length}` : ""),
        [["value"], ["bytes", true], ["role"], ["next read by"]], rows),
    );
    values.scrollTo(0, 0);
  }

  function show(i) {
    current = Math.max(0, Math.min(N - 1, i));
    const { min, max } = chart.scales.x;
    if (max && (xs[current + 1] <= min || xs[current] >= max)) zoom(1); // no scale before the first picture
    area.setAttribute("aria-valuenow", String(current + 1));
    area.setAttribute("aria-valuetext", describe(current));
    drawLegend();
    placeMark();
    fillReadout(current);
  }

  function zoom(factor) {
    const least = Math.max(xs[N] / N / 4, xs[current + 1] - xs[current]); // an op fills the picture at most
    const span = Math.min(xs[N], Math.max(least, (chart.scales.x.max - chart.scales.x.min) * factor));
    const middle = (xs[current] + xs[current + 1]) / 2;
    const min = Math.max(0, Math.min(xs[N] - span, middle - span / 2));
    chart.setScale("x", { min, max: min + span });
  }

  const tenth = Math.max(1, Math.round(N / 10));
  const keys = {
    ArrowRight: () => show(current + 1), ArrowUp: () => show(current + 1),
    ArrowLeft: () => show(current - 1), ArrowDown: () => show(current - 1),
    PageUp: () => show(current + tenth), PageDown: () => show(current - tenth),
    Home: () => show(0), End: () => show(N - 1),
    p: () => show(data.peak.moment),
    r: () => again.length && show(again.find((i) => i > current) ?? again[0]),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => zoom(Infinity),
  };
  controlled(area, keys, (event) => {
    const box = chart.over.getBoundingClientRect();
    const [left, x] = [event.clientX - box.left, chart.posToVal(event.clientX - box.left, "x")];
    if (left >= 0 && left <= box.width) show(xs.findLastIndex((begin, i) => i < N && begin <= x));
  });
  scale.addEventListener("change", () => {
    xs = scale.value === "time" ? time : counted;
    chart.setData(columns());
  });

  document.getElementById("memory-picture").append(
    el("div", { class: "controls" },
      button("Peak", keys.p), button("Previous op", keys.ArrowLeft), button("Next op", keys.ArrowRight),
      ...(again.length ? [button("Next run again", keys.r)] : []),
      button("Zoom in", keys["+"]), button("Zoom out", keys["-"]), button("Whole step", keys[0]),
      el("label", { for: "memory-scale" }, "Along:"), scale),
    area,
    ...(links ? [links.area] : []),
    el("div", { class: "under" }, legend, readout),
  );
  if (!(time[N] > 0)) scale.firstElementChild.disabled = true;
  kept(area, () => {
    chart.setSize({ width: area.clientWidth, height: area.clientHeight });
    chart.redraw(false);
  });
  show(current);
  return {
    show,
    /** Shows a moment and brings the picture into sight. */
    go: (i) => {
      show(i);
      area.focus({ preventScroll: true });
      document.getElementById("memory").scrollIntoView();
    },
  };
})();
