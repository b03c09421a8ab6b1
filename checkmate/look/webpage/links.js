// Under the memory of a plan that uses links: a lane for each, with bars, framed where the step waits for it; at last the
// bytes in a second memory, where values wait there.

const links = (() => {
  if (!data.links) return null;
  const { lanes, memory: there } = data.links;
  const area = el("div", { id: "links-area", class: "picture", role: "img", "aria-label": "Links over the step",
    "aria-describedby": "links-text" });
  const begins = data.moments.begin;
  const most = Math.max(1, there?.most ?? 0);
  const [lane, tall] = [22, there ? 60 : 0]; // pixels of the page: of each link, of the bytes there
  const floor = lane * lanes.length + (there ? tall + 12 : 0); // from the top
  area.style.height = `${floor + 4}px`;
  let [xs, current] = [begins, 0];

  /** The name of a link, as far as there is room beside its lane. */
  function short(name) {
    return name.length > 10 ? `${name.slice(0, 9)}…` : name;
  }

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
      { grid: { show: false }, splits: () => [...lanes.map((_, i) => (i + 0.5) * lane), ...(there ? [floor - tall / 2] : [])],
        values: () => [...lanes.map(({ name }) => short(name)), ...(there ? ["there"] : [])] },
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
      lanes.forEach((link, i) => {
        pen.fillStyle = hatch(pen, { ...link, ink: "rgba(255, 255, 255, 0.7)" }, 1);
        for (const [begin, end] of link.bars) pen.fillRect(...bar(begin, end, i * lane + 3, lane - 6, 0.75));
        Object.assign(pen, { strokeStyle: colour("again"), lineWidth: 2 });
        for (const [begin, end] of link.waits) pen.strokeRect(...bar(begin, end, i * lane + 1, lane - 2, 1));
      });
      if (!there) return;
      pen.fillStyle = colour("kept");
      there.levels.forEach(([from, bytes], i) => {
        const until = i + 1 < there.levels.length ? there.levels[i + 1][0] : begins[N];
        pen.fillRect(...bar(from, until, floor - bytes / most * tall, bytes / most * tall, 0));
      });
      patch(pen, `at most ${formatBytes(there.most)} there`, 8, floor - tall + 10, width - 12);
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
