// The step as arrays: executions ("moments") in order, and copies of values ("spans") with their first and last moment.

const N = data.moments.op.length;
const T = data.ops.name.length;

const step = (() => {
  const begin = new Float64Array(N + 1);
  const time = new Int32Array(N); // how often the op has run before
  const stage = new Int32Array(N); // stage t ends with the first execution of op t
  const first = new Int32Array(T); // the moment of an op's first execution
  const runs = new Int32Array(T);
  const again = []; // moments at which an op runs again
  let stages = 0;
  for (let i = 0; i < N; i++) {
    const k = data.moments.op[i];
    begin[i + 1] = begin[i] + data.ops.seconds[k];
    stage[i] = stages;
    time[i] = runs[k]++;
    if (time[i]) again.push(i);
    else {
      first[k] = i;
      stages++;
    }
  }
  return { begin, time, stage, first, runs, again };
})();

/** For each role with any bytes, in the order in which areas lie upon each other, its bytes at each moment. */
const roles = (() => {
  const sums = data.roles.map(() => new Float64Array(N + 1));
  const names = data.roles.map((role) => role.name);
  for (const [name, size] of Object.entries(data.resident)) sums[names.indexOf(name)].fill(size);
  for (const [value, role, , from, to] of data.spans) {
    const size = data.values.bytes[value];
    for (let i = from; i <= to; i++) sums[role][i] += size;
  }
  const workspace = sums[names.indexOf("workspace")];
  for (let i = 0; i < N; i++) workspace[i] += data.ops.workspace[data.moments.op[i]];
  return data.roles.map((role, r) => ({ ...role, bytes: sums[r] })).filter((role) => role.bytes.some((b) => b > 0));
})();

/** The copies at hand at a moment, the most bytes first. */
function alive(i) {
  const here = data.spans.filter(([, , , from, to]) => from <= i && i <= to);
  return here.sort((a, b) => data.values.bytes[b[0]] - data.values.bytes[a[0]]);
}

function whereOf(k) {
  return data.places[data.ops.place[k]];
}

function phaseOf(k) {
  return k < data.forward ? "forward" : "backward";
}

function nth(n) {
  const ending = n % 100 >= 11 && n % 100 <= 13 ? "th" : { 1: "st", 2: "nd", 3: "rd" }[n % 10] || "th";
  return n + ending;
}

/** The first of the moments in a sorted list that is beyond i, or the first of all. */
function following(list, i) {
  return list.find((j) => j > i) ?? list[0];
}
