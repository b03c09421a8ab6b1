// The schedule as a triangle, a row for each stage, a column for each op: what runs (R), what is at hand before (S).

{
  const area = el("div", {
    id: "schedule-area", class: "picture", role: "application", tabindex: "0",
    "aria-label": "Schedule: stages down, ops across", "aria-describedby": "schedule-text schedule-keys",
  });
  const readout = el("div", { id: "schedule-readout", class: "readout", role: "status" });
  const runs = data.moments.op.map((k, i) => [data.moments.stage[i], k]); // of each moment
  const moments = new Map(runs.map(([t, k], i) => [t * T + k, i]));
  const crosses = again.map((i) => runs[i]); // ascending, as moments are
  const keptBy = Array.from({ length: T }, () => []); // by op, [value, first stage, last stage] at whose begin it is there
  for (const span of data.kept) keptBy[data.values.producer[span[0]]].push(span);
  let at = crosses[0] ?? [0, 0];

  const ends = [-0.5, T - 0.5];
  const axis = { incrs: WHOLE, space: 60, values: countedFrom(0), grid: { show: false }, labelSize: 20 };
  const picture = chart(area, {
    padding: [0, 22, 46, 0], columns: [ends, [0, 0]],
    scales: { x: { time: false, range: ends }, y: { range: ends, dir: -1 } },
    axes: [{ ...axis, side: 0, label: "op, in the order of first execution" }, { ...axis, size: 44, label: "stage" }],
    paint, point,
    keys: {
      ArrowRight: () => show(at[0], at[1] + 1), ArrowLeft: () => show(at[0], at[1] - 1),
      ArrowDown: () => show(at[0] + 1, at[1]), ArrowUp: () => show(at[0] - 1, at[1]),
      Home: () => show(at[0], 0), End: () => show(at[0], at[0]),
      r: () => toAgain(1), R: () => toAgain(-1),
    },
  });

  function paint(pen, side) {
    const cell = side / T;
    stroke(pen, "line", 1, [], [0, 0], [side, 0], [side, side], [0, side], [0, 0]);
    pen.fillStyle = colour("kept");
    for (const [value, first, last] of data.kept) {
      const k = data.values.producer[value];
      pen.fillRect(...picture.box(k - 0.5, k + 0.5, first - 0.5, last + 0.5));
    }
    pen.fillStyle = colour("first");
    const dot = Math.max(1.2, 0.8 * cell);
    for (let k = 0; k < T; k++) pen.fillRect((k + 0.5) * cell - dot / 2, (k + 0.5) * cell - dot / 2, dot, dot);
    const half = Math.max(2.2, Math.min(8, 0.4 * cell));
    for (const [ink, wide] of [["paper", cell < 2 ? 0.01 : 3.5], ["again", 1.8]]) for (const [t, k] of crosses) {
      const [x, y] = [(k + 0.5) * cell, (t + 0.5) * cell];
      for (const slant of [half, -half]) stroke(pen, ink, wide, [], [x - half, y - slant], [x + half, y + slant]);
    }
    if (data.forward > 0 && data.forward < T) paintHalves(pen, side, data.forward * cell);
  }

  function paintHalves(pen, side, border) {
    for (const line of [[[0, border], [side, border]], [[border, 0], [border, side]]]) stroke(pen, "ink", 1, [5, 4], ...line);
    Object.assign(pen, { fillStyle: colour("ink"), textAlign: "center", textBaseline: "top" });
    pen.translate(side + 19, 0);
    pen.rotate(Math.PI / 2);
    pen.fillText("forward", border / 2, 0);
    pen.fillText("backward", (border + side) / 2, 0);
  }

  function show(t, k) {
    at = [t, k] = [t, k].map((n) => Math.max(0, Math.min(T - 1, n)));
    const moment = moments.get(t * T + k);
    const here = keptBy[k].filter(([, first, last]) => first <= t && t <= last);
    const names = here.map(([value]) => `${data.values.name[value]} (${formatBytes(data.values.bytes[value])})`).join(", ");
    let does = "does not run in this stage";
    if (k === t) does = "runs for the first time and ends the stage";
    else if (k > t) does = "cannot run yet: its first execution is later";
    else if (moment !== undefined) does = `is run again, for the ${data.moments.nth[moment]} time`;
    if (moment !== undefined) does += runsOver(moment);
    readout.replaceChildren(
      el("h3", {}, `Stage ${t}, op ${k}`),
      facts([
        ["op", `${data.ops.name[k]} ${does}.`],
        ["at hand", k > t ? "" : names ? `${names}, when the stage begins` : "nothing it made, when the stage begins"],
        ["where", data.ops.where[k]],
        ["stage", `ends with the first execution of ${data.ops.name[t]}, in the ${t < data.forward ? "forward" : "backward"}`],
      ]),
      ...(moment === undefined ? [] : [button("Show it in the memory", () => memory.go(moment))]),
    );
    picture.frame(k - 0.5, k + 0.5, t - 0.5, t + 0.5);
  }

  function toAgain(sign) {
    const list = sign > 0 ? crosses : [...crosses].reverse();
    const next = list.find(([t, k]) => sign * (t * T + k - at[0] * T - at[1]) > 0) ?? list[0];
    if (next) show(...next);
  }

  function point(x, y) {
    const reach = 6 * T / picture.u.over.clientWidth; // small crosses are caught from nearby
    let [best, nearest] = [[Math.round(y), Math.round(x)], reach > 1 ? reach : 0];
    for (const cross of nearest ? crosses : []) {
      const away = Math.hypot(cross[1] - x, cross[0] - y);
      if (away < nearest) [nearest, best] = [away, cross];
    }
    if (best[0] !== at[0] || best[1] !== at[1]) show(...best);
  }

  const signs = [["first", "", "first execution (R)"], ["again", "✕", "run again (R)"],
    ["kept", "", "at hand when the stage begins (S)"]];
  document.getElementById("schedule-picture").append(
    el("div", { class: "controls" }, ...(again.length
      ? [button("Previous run again", () => toAgain(-1)), button("Next run again", () => toAgain(1))] : [])),
    el("div", { class: "beside" }, area,
      el("div", {},
        el("ul", { class: "legend", "aria-label": "Signs" }, ...signs.map(([name, sign, text]) =>
          el("li", {}, el("span", { class: "swatch " + name, "aria-hidden": "true" }, sign), el("span", {}, text)))),
        readout)),
  );
  show(...at);
}
