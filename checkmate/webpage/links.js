// Under the memory of a plan that sends values to a second one: transfers as bars, where the step waits, the bytes there.

const links = (() => {
  if (!data.links) return null;
  const { lanes, levels, crossings, stalls } = data.links;
  const area = el("div", { id: "links-area", class: "picture", role: "img", "aria-label": "The second memory and its links",
    "aria-describedby": "links-text" });
  const begins = data.moments.begin;
  const most = Math.max(1, ...levels.map(([, bytes]) => bytes));
  const [lane, tall, floor] = [22, 60, 116]; // pixels of the page: of each link, of the bytes there, from the top
  let [xs, current] = [begins, 0];

  /** Where so many seconds are along the picture, by time or op by op. */
  function along(seconds) {
    if (xs === begins) return seconds;
    const after = begins.findIndex((begin, i) => i && begin > seconds);
    const i = after < 0 ? N - 1 : after - 1;
    const long = begins[i + 1] - begins[i];
    return i + (long > 0 ? Math.min(1, (seconds - begins[i]) / long) : 0);
  }

  const picture = chart(area, {
    padding: [0, 14, 4, 0], columns: [[0, 1], [0, 0]],
    scales: { x: { time: false }, y: { range: [0, floor], dir: -1 } },
    axes: [
      { show: false },
      { grid: { show: false }, splits: () => [lane / 2, 1.5 * lane, floor - tall / 2],
        values: () => [...lanes.map(({ name }) => name), "there"] },
    ],
    paint(pen, width) {
      const bar = (begin, end, top, height, least) => {
        const [x, , width] = picture.box(along(begin), along(end), 0, 0);
        return [x, top, Math.max(least, width), height];
      };
      pen.beginPath();
      pen.rect(0, 0, width, floor);
      pen.clip();
      pen.fillStyle = colour("shade");
      pen.fillRect(...bar(begins[current], begins[current + 1], 0, floor, 2));
      for (const [back, begin, end] of crossings) {
        pen.fillStyle = hatch(pen, lanes[back], 1);
        pen.fillRect(...bar(begin, end, back * lane + 3, lane - 6, 0.75));
      }
      Object.assign(pen, { strokeStyle: colour("again"), lineWidth: 2 });
      for (const [begin, end] of stalls) pen.strokeRect(...bar(begin, end, 1, 2 * lane - 2, 1));
      pen.fillStyle = colour("kept");
      levels.forEach(([from, bytes], i) => {
        const until = i + 1 < levels.length ? levels[i + 1][0] : begins[N];
        pen.fillRect(...bar(from, until, floor - bytes / most * tall, bytes / most * tall, 0));
      });
      patch(pen, `at most ${formatBytes(data.links.most)} there`, 8, floor - tall + 10, width - 12);
    },
  });

  return {
    area,
    /** Draws beside what the memory's picture shows now. */
    draw({ min, max }, along, shown) {
      [xs, current] = [along, shown];
      picture.u.setScale("x", { min, max });
      picture.u.redraw(false);
    },
  };
})();
