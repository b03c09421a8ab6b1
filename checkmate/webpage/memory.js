// Bytes at hand over the step as stacked areas; a cursor that the pointer and the keyboard move from op to op.

const memory = (() => {
  const area = el("div", {
    id: "memory-area", class: "picture", role: "slider", tabindex: "0", "aria-label": "Op of the step",
    "aria-describedby": "memory-text memory-keys", "aria-valuemin": "1", "aria-valuemax": String(N),
  });
  const below = el("canvas", { "aria-hidden": "true" });
  const above = el("canvas", { "aria-hidden": "true" });
  area.append(below, above);
  const scale = el("select", { id: "memory-scale" }, el("option", { value: "time" }, "by time"),
    el("option", { value: "ops" }, "op by op"));
  const legend = el("ul", { class: "legend", "aria-label": "Bytes by role at the op shown" });
  const readout = el("div", { id: "memory-readout", class: "readout", role: "region", tabindex: "0",
    "aria-label": "The op shown" });
  const values = el("div", { class: "values", role: "region", tabindex: "0", "aria-label": "Values alive" });

  const tops = []; // for each role, the bytes up to and with it
  for (const role of data.roles) {
    const lower = tops[tops.length - 1];
    tops.push(role.bytes.map((b, i) => b + (lower ? lower[i] : 0)));
  }
  const counted = Float64Array.from({ length: N + 1 }, (_, i) => i);
  const total = data.moments.begin[N];
  if (!(total > 0)) scale.value = "ops";
  let xs = total > 0 ? data.moments.begin : counted; // where each moment begins, and the last one ends
  let view = [0, xs[N]];
  let current = data.peak.moment;
  const margin = { left: 74, right: 14, top: 30, bottom: 40 };
  const ceiling = Math.max(1, data.peak.bytes, data.budget.bytes <= 1.5 * data.peak.bytes ? data.budget.bytes : 0) * 1.3;

  const across = (x, width) => margin.left + (x - view[0]) / (view[1] - view[0]) * (width - margin.left - margin.right);
  const up = (bytes, height) => height - margin.bottom - bytes / ceiling * (height - margin.top - margin.bottom);

  /** The last moment that begins at x or before. */
  function momentAt(x) {
    let [low, high] = [0, N];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return low;
  }

  function axes(pen, width, height) {
    pen.strokeStyle = colour("faint");
    pen.fillStyle = colour("soft");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const [bytes, text] of labelled(ticks(0, ceiling, 6), BYTE_UNITS)) {
      const y = Math.round(up(bytes, height)) + 0.5;
      pen.beginPath();
      pen.moveTo(margin.left, y);
      pen.lineTo(width - margin.right, y);
      pen.stroke();
      pen.fillText(text, margin.left - 6, y);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const timed = scale.value === "time";
    const at = ticks(view[0], view[1], Math.max(3, width / 110));
    const named = timed ? labelled(at, SECOND_UNITS) : at.filter((i) => Number.isInteger(i) && i < N).map((i) => [i, String(i + 1)]);
    for (const [x, text] of named) pen.fillText(text, Math.min(across(x, width), width - 24), height - margin.bottom + 5);
    pen.fillText(timed ? "time in the step" : "executions, in order", (margin.left + width) / 2, height - 17);
  }

  function areas(pen, width, height) {
    const from = momentAt(view[0]);
    const to = Math.min(N, momentAt(view[1]) + 1);
    const edge = (path, row, back) => {
      for (let n = 0; n < to - from; n++) {
        const i = back ? to - 1 - n : from + n;
        const y = up(row ? row[i] : 0, height);
        const [a, b] = [across(xs[i], width), across(xs[i + 1], width)];
        path.lineTo(back ? b : a, y);
        path.lineTo(back ? a : b, y);
      }
    };
    data.roles.forEach((role, r) => {
      const path = new Path2D();
      edge(path, tops[r], false);
      edge(path, tops[r - 1], true);
      path.closePath();
      for (const fill of [role.fill, hatch(pen, role.hatch)].filter(Boolean)) {
        pen.fillStyle = fill;
        pen.fill(path);
      }
    });
    const outline = new Path2D();
    edge(outline, tops[tops.length - 1], false);
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 0.8;
    pen.stroke(outline);
  }

  function budgetAndHalves(pen, width, height) {
    pen.strokeStyle = colour("ink");
    const border = across(xs[data.moments.boundary], width);
    if (data.moments.boundary > 0 && data.moments.boundary < N && border > margin.left && border < width - margin.right) {
      pen.lineWidth = 1;
      pen.setLineDash([2, 3]);
      pen.beginPath();
      pen.moveTo(border, margin.top - 22);
      pen.lineTo(border, height - margin.bottom);
      pen.stroke();
      pen.fillStyle = colour("ink");
      pen.textBaseline = "top";
      pen.textAlign = "right";
      pen.fillText("forward", border - 6, 6);
      pen.textAlign = "left";
      pen.fillText("backward", border + 6, 6);
    }
    if (data.budget.bytes > ceiling) return;
    const y = up(data.budget.bytes, height);
    pen.lineWidth = 2;
    pen.setLineDash([9, 4]);
    pen.beginPath();
    pen.moveTo(margin.left, y);
    pen.lineTo(width - margin.right, y);
    pen.stroke();
    pen.setLineDash([]);
  }

  function labels(pen, width, height) {
    const room = width - margin.left - margin.right - 12;
    const beyond = data.budget.bytes > ceiling;
    const level = beyond ? margin.top + 36 : up(data.budget.bytes, height) - 13;
    patch(pen, beyond ? data.budget.label + ", above this picture" : data.budget.label, margin.left + 8, level, room);
    const i = data.peak.moment;
    const x = across((xs[i] + xs[i + 1]) / 2, width);
    if (x < margin.left || x > width - margin.right) return;
    const y = up(data.peak.bytes, height);
    pen.fillStyle = colour("mark");
    pen.strokeStyle = colour("paper");
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(x, y - 1); // a triangle that stands on the peak
    pen.lineTo(x - 7, y - 14);
    pen.lineTo(x + 7, y - 14);
    pen.closePath();
    pen.fill();
    pen.stroke();
    const text = data.peak.label;
    const wide = Math.min(pen.measureText(text).width, room);
    const left = x < width / 2 ? Math.min(x + 12, width - margin.right - wide - 4) : Math.max(margin.left + 6, x - 12 - wide);
    patch(pen, text, left, margin.top + 10, room);
  }

  function draw() {
    const { pen, width, height } = cleared(below);
    if (width < margin.left + margin.right + 10) return;
    axes(pen, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(margin.left, 0, width - margin.left - margin.right, height - margin.bottom);
    pen.clip();
    areas(pen, width, height);
    budgetAndHalves(pen, width, height);
    pen.restore();
    labels(pen, width, height);
    drawLegend();
    drawCursor();
  }

  function drawCursor() {
    const { pen, width, height } = cleared(above);
    const a = Math.max(margin.left, across(xs[current], width));
    const b = Math.max(a + 2, Math.min(width - margin.right, across(xs[current + 1], width)));
    if (a > width - margin.right) return;
    const highest = up(data.moments.bytes[current], height) - 4;
    for (const [ink, wide] of [["paper", 4], ["mark", 1.5]]) {
      pen.strokeStyle = colour(ink);
      pen.lineWidth = wide;
      if (b - a < 4) { // too narrow for a box: a line
        pen.beginPath();
        pen.moveTo((a + b) / 2, highest);
        pen.lineTo((a + b) / 2, height - margin.bottom);
        pen.stroke();
      } else pen.strokeRect(a, highest, b - a, height - margin.bottom - highest);
    }
    pen.fillStyle = colour("mark");
    pen.beginPath();
    pen.moveTo((a + b) / 2, height - margin.bottom - 7);
    pen.lineTo((a + b) / 2 - 6, height - margin.bottom + 3);
    pen.lineTo((a + b) / 2 + 6, height - margin.bottom + 3);
    pen.fill();
  }

  /** The roles from the top area to the lowest one, each with its hatch and its bytes at the op shown. */
  function drawLegend() {
    if (!legend.children.length) for (const role of [...data.roles].reverse()) {
      const swatch = el("canvas", { width: "64", height: "36", "aria-hidden": "true" });
      const pen = swatch.getContext("2d");
      pen.scale(2, 2);
      for (const fill of [role.fill, hatch(pen, role.hatch)].filter(Boolean)) {
        pen.fillStyle = fill;
        pen.fillRect(0, 0, 32, 18);
      }
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
    return `${data.ops.name[k]}${times}, ${formatBytes(data.moments.bytes[i])} at hand, ${i + 1} of ${N}`;
  }

  function fillReadout(i) {
    const k = data.moments.op[i];
    const here = data.spans.filter(([, , , from, to]) => from <= i && i <= to); // the most bytes first, as all are
    const half = i < data.moments.boundary ? "forward" : "backward";
    const times = data.moments.nth[i] ? `, for the ${data.moments.nth[i]} time` : "";
    const rows = here.slice(0, 100).map(([value, role, copy, , , uses]) => {
      const next = uses.find((use) => use > i);
      return [
        data.values.name[value] + (copy ? ` (copy ${copy + 1})` : ""),
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
        ["workspace", data.ops.workspace[k] ? formatBytes(data.ops.workspace[k]) : ""],
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
    if (xs[current + 1] <= view[0] || xs[current] >= view[1]) {
      const half = (view[1] - view[0]) / 2;
      const middle = Math.max(half, Math.min(xs[N] - half, xs[current]));
      view = [middle - half, middle + half];
      draw();
    }
    area.setAttribute("aria-valuenow", String(current + 1));
    area.setAttribute("aria-valuetext", describe(current));
    drawLegend();
    drawCursor();
    fillReadout(current);
  }

  function zoom(factor) {
    const least = Math.max(xs[N] / N / 4, xs[current + 1] - xs[current]); // an op fills the picture at most
    const span = Math.min(xs[N], Math.max(least, (view[1] - view[0]) * factor));
    const middle = (xs[current] + xs[current + 1]) / 2;
    const from = Math.max(0, Math.min(xs[N] - span, middle - span / 2));
    view = [from, from + span];
    draw();
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
  area.addEventListener("keydown", (event) => {
    const act = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key] || keys[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  });
  const point = (event) => {
    const box = area.getBoundingClientRect();
    const x = (event.clientX - box.left - margin.left) / (box.width - margin.left - margin.right);
    if (x >= 0 && x <= 1) show(momentAt(view[0] + x * (view[1] - view[0])));
  };
  area.addEventListener("pointermove", point);
  area.addEventListener("pointerdown", point);
  scale.addEventListener("change", () => {
    xs = scale.value === "time" ? data.moments.begin : counted;
    view = [0, xs[N]];
    draw();
  });

  document.getElementById("memory-picture").append(
    el("div", { class: "controls" },
      button("Peak", keys.p), button("Previous op", keys.ArrowLeft), button("Next op", keys.ArrowRight),
      ...(again.length ? [button("Next run again", keys.r)] : []),
      button("Zoom in", keys["+"]), button("Zoom out", keys["-"]), button("Whole step", keys[0]),
      el("label", { for: "memory-scale" }, "Along:"), scale),
    area,
    el("div", { class: "under" }, legend, readout),
  );
  if (!(total > 0)) scale.firstElementChild.disabled = true;
  show(current);
  kept(area, draw);
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
