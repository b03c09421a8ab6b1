// Under the memory of a plan that sends values to a second one: transfers as bars, where the step waits, the bytes there.

const links = (() => {
  if (!data.links) return null;
  const { lanes, levels, crossings, stalls } = data.links;
  const canvas = el("canvas", { "aria-hidden": "true" });
  const area = el("div", { id: "links-area", class: "picture", role: "img", "aria-label": "The second memory and its links",
    "aria-describedby": "links-text" }, canvas);
  const begins = data.moments.begin;
  const most = Math.max(1, ...levels.map(([, bytes]) => bytes));

  /** Where so many seconds are along the picture, by time or op by op. */
  function along(seconds, xs) {
    if (xs === begins) return seconds;
    const after = begins.findIndex((begin, i) => i && begin > seconds);
    const i = after < 0 ? N - 1 : after - 1;
    const long = begins[i + 1] - begins[i];
    return i + (long > 0 ? Math.min(1, (seconds - begins[i]) / long) : 0);
  }

  /** Draws beside what the memory's picture shows now. */
  function draw(chart, xs, current) {
    if (!area.clientWidth) return;
    const { pen, height } = cleared(canvas);
    const [left, right] = [chart.over.offsetLeft, chart.over.offsetLeft + chart.over.clientWidth];
    const x = (at) => Math.max(left, Math.min(right, left + chart.valToPos(at, "x")));
    const at = (seconds) => x(along(seconds, xs));
    const [lane, floor] = [22, height - 4];
    const tall = floor - 2 * lane - 12;
    pen.fillStyle = colour("shade");
    pen.fillRect(x(xs[current]), 0, Math.max(2, x(xs[current + 1]) - x(xs[current])), floor);
    for (const [back, begin, end] of crossings) {
      pen.fillStyle = hatch(pen, lanes[back], 1);
      pen.fillRect(at(begin), back * lane + 3, Math.max(0.75, at(end) - at(begin) - 0.5), lane - 6);
    }
    pen.strokeStyle = colour("again");
    pen.lineWidth = 2;
    for (const [begin, end] of stalls) {
      const [a, b] = [at(begin), at(end)];
      if (b > a) pen.strokeRect(a, 1, Math.max(1, b - a), 2 * lane - 2);
    }
    pen.beginPath();
    pen.moveTo(left, floor);
    levels.forEach(([seconds, bytes], i) => {
      if (i) pen.lineTo(at(seconds), floor - levels[i - 1][1] / most * tall);
      pen.lineTo(at(seconds), floor - bytes / most * tall);
    });
    pen.lineTo(right, floor - levels[levels.length - 1][1] / most * tall);
    pen.lineTo(right, floor);
    pen.fillStyle = colour("kept");
    pen.fill();
    pen.strokeStyle = colour("ink");
    pen.lineWidth = 0.8;
    pen.stroke();
    pen.fillStyle = colour("soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    lanes.forEach((of, i) => pen.fillText(of.name, left - 6, (i + 0.5) * lane));
    pen.fillText("there", left - 6, floor - tall / 2);
    patch(pen, `at most ${formatBytes(data.links.most)} there`, left + 8, floor - tall + 10, right - left - 12);
  }

  return { area, draw };
})();
