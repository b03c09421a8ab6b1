"""Write the figures of README and of docs/ from the committed rows.

    python -m benchmarks.pages

On a page a figure stands between a comment with its name and an empty comment, as in `<!--arena-time-->0.85<!---->`; a
table stands so on lines of its own. `figures` has the text of each name.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import versions
from benchmarks.census import report as census
from benchmarks.common.rows import Column, Row, cell, documented, latest, read
from benchmarks.common.runner import RESULTS, table_of
from benchmarks.homes import measured as homes
from benchmarks.kernels import report as kernels
from benchmarks.peers import report as peers
from benchmarks.second_memory import planned as second_memory
from benchmarks.sharded import planned as sharded
from benchmarks.solve import picture, stages
from benchmarks.start.seconds import LOOP
from checkmate.profiling import roofline
from checkmate.units import format_bytes

ROOT = RESULTS.parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"<!--([\w-]+)-->(.*?)<!---->", re.DOTALL)
OURS = "checkmate.training_step, "


def rows_of(name: str, *keys: str) -> dict[Any, Row]:
    """The last committed row for each value of these keys: by that value, or by a tuple of values."""
    rows = latest(read(RESULTS / f"{name}.jsonl"), *keys)
    return {tuple(row[key] for key in keys) if len(keys) > 1 else row[keys[0]]: row for row in rows}


def table(columns: Mapping[str, Column], rows: Iterable[Row], *words: str) -> str:
    """A table in Markdown; ``words`` are heads of columns without numbers, beside the first."""
    return table_of(columns, rows, set(words)).markdown()


def to(values: Iterable[float], form: str = ".2f", scale: float = 1.0) -> str:
    """The least and the largest of values: "0.85 to 1.18"."""
    found = sorted(values)
    return f"{found[0] * scale:{form}} to {found[-1] * scale:{form}}"


def beside_others() -> dict[str, str]:
    """Other ways to save memory, and fused kernels."""
    runs = peers.runs_of(RESULTS / "peers.jsonl")
    sums = [peers.summary(rows) for rows in runs.values()]
    told = {f"peers-{word}": str(sum(row[word] for row in sums)) for word in ("exact", "faster", "slower")}
    told["peers-networks"] = str(len(sums))
    told["peers-least"] = str(sum(row["peer"] is None or row["ours"] < row["peer"]["peak"] for row in sums))
    told |= {f"peers-{name}": peers.short(runs[name]) for name in ("gpt2", "mobilenetv2")}
    rows = read(RESULTS / "kernels.jsonl")
    told["kernels-time"] = kernels.tables(rows)["time of a step"]
    run = kernels.latest(rows)["gpt2"]
    for name, way in (("compiled", kernels.COMPILED), ("same-bits", f"same-bits, {kernels.KEEP}")):
        told |= {f"kernels-{name}-{start}": f"{run[way][start]:.1f} s" for start in ("cold", "warm")}
    return told


def first_steps() -> dict[str, str]:
    """Seconds of a first step, and of plans near the smallest budget."""
    rows = read(RESULTS / "start.jsonl")
    first = {
        (row["model"], row["by"], row["start"]): row
        for row in latest((row for row in rows if not row.get("times")), "model", "by", "start", "own_seconds", "batch")
    }

    def of(name: str) -> Row:
        ours, later, theirs = (
            first[name, by, start]
            for by, start in (("checkmate", "cold"), ("checkmate", "warm"), ("aot_eager", "cold"))
        )
        return {**ours, "later": later["step_seconds"], "theirs": theirs["step_seconds"]}

    shown = [of(name) for name in ("resnet50-wide", "gpt2-12", "unet-attention", "bert-4")]
    columns: dict[str, Column] = {
        "network": "{model}",
        "first step": "{step_seconds:.1f} s",
        "measuring": "{measure_seconds:.1f} s",
        "planning": "{plan_seconds:.1f} s",
        "in a later run": "{later:.1f} s",
        "`aot_eager`": "{theirs:.1f} s",
    }
    near = {(row["model"], row["times"]): row for row in rows if row.get("times")}
    seconds = {
        n: to((row["plan_seconds"] for (_, times), row in near.items() if times == n), ".1f") for n in (1.02, 1.1)
    }
    loop = of(LOOP)
    return {
        "start-first": table(columns, shown),
        "start-near": f"{seconds[1.1]} s",
        "start-nearest": f"{seconds[1.02]} s",
        "start-loop": f"{loop['step_seconds']:.1f} s",
        "start-loop-ops": f"{loop['ops']:,}",
        "start-loop-theirs": f"{loop['theirs']:.1f} s",
        "start-thousand": f"{1000 * (loop['dynamo_seconds'] + loop['aot_seconds']) / loop['ops']:.1f} s",
    }


def changing_lengths() -> dict[str, str]:
    """Steps a second of an epoch, and seconds of each further length."""
    told = {
        f"epoch-{row['way']}-{'longest' if row['multiple'] > 32 else row['multiple']}": (
            f"{row['steps'] / row['seconds']:.1f}"
        )
        for row in rows_of("epoch", "way", "multiple").values()
    }
    told["epoch-lengths"] = str(max(row["lengths"] for row in rows_of("epoch", "way", "multiple").values()))
    for name, model in (("lengths", "gpt2"), ("words", "gpt2-words")):
        rows = [row for row in rows_of("lengths", "model", "place").values() if row["model"] == model]
        told[f"{name}-further"] = to((row["seconds"] for row in rows if row["place"] > 1), ".1f") + " s"
        told[f"{name}-first"] = f"{rows[0]['seconds']:.0f} s"
    return told


def smallest_budgets() -> dict[str, str]:
    """What lowers the smallest budget, and how close plans are to the best there."""
    ways, graphs = rows_of("ways", "network", "form"), rows_of("gpu_graphs", "network", "kind")
    least = {key: row["smallest"] for key, row in ways.items()}
    networks = ("vgg16", "unet", "resnet18", "mobilenetv2", "resnet50", "densenet121")
    images = [1 - least[name, "ways"] / least[name, "file"] for name in networks]
    told = {"ways-images": to(images, ".0f", 100) + " %"}
    for name in ("gpt2-12", "bert-base"):
        told[f"ways-{name}"] = f"{least[name, 'file'] / 1e9:.2f} to {least[name, 'ways'] / 1e9:.2f} GB"
        row = graphs[name, "float32"]
        told[f"parts-{name}"] = f"{row['least'] / 1e9:.2f} to {row['least_in_parts'] / 1e9:.2f} GB"
    loss: dict[str, Column] = {
        "way": "{way}",
        "peak": "{peak:MB}",
        "step / plain": "{ratio:.2f}",
        "numbers": lambda row: "same bits" if row["same_bits"] else f"differ by {row['difference']:.0e}",
    }
    told["loss-ways"] = table(loss, rows_of("loss", "way").values(), "numbers")
    gaps: dict[str, float] = {}
    for row in sorted(read(RESULTS / "tight.jsonl"), key=lambda row: row["time_limit"]):  # the longest limit is last
        if row["times"] == 1.1:
            gaps[row["network"]] = row["gap"]
    close = [gap for gap in gaps.values() if gap < 0.004]
    told |= {"tight-close": f"{len(close)} of {len(gaps)}", "tight-gap": f"{max(close):.1%}"}
    told["tight-others"] = to((gap for gap in gaps.values() if gap not in close), ".0f", 100) + " %"
    return told


def whole_steps() -> dict[str, str]:
    """Whole training steps with AdamW."""
    rows = rows_of("whole_steps", "model", "way")

    def peak_of(way: str) -> Column:
        return lambda row: cell(rows[row["name"], way], "{peak:MB}")

    ways = {
        "smallest budget": f"{OURS}smallest",
        "compile + AdamW": "checkmate.compile, smallest",
        "checkpoint + hooks": "hooks + checkpoint, each block",
    }
    columns: dict[str, Column] = {"whole step": "{name}"}
    columns |= {head: peak_of(way) for head, way in ways.items()}
    columns["keep all / plain"] = lambda row: f"{rows[row['name'], f'{OURS}keep all']['time_ratio']:.2f}"
    names = dict.fromkeys(name for name, way in rows if way == f"{OURS}smallest")
    return {"whole-steps": table(columns, [{"name": name} for name in names])}


def at_full_size() -> dict[str, str]:
    """Plans of steps at the size people train, estimated for an H100."""
    solved = [
        row
        for row in rows_of("solve", "graph", "share", "method").values()
        if row["method"] == "auto" and not row["graph"].startswith("chain")
    ]
    smallest: dict[str, Row] = {}
    for row in sorted((row for row in solved if row.get("cost_ratio")), key=lambda row: (row["ops"], -row["share"])):
        smallest[row["graph"]] = row
    plans: dict[str, Column] = {
        "network": "{graph}",
        "ops": "{ops}",
        "budget": "{share:.0%}",
        "recomputed": lambda row: f"{row['cost_ratio'] - 1:.1%}",
        "gap": "{gap:.2%}",
        "stopped after": "{seconds:.1f} s",
    }
    graphs = rows_of("gpu_graphs", "network", "kind")

    def sizes(kind: str) -> tuple[Column, Column]:
        def least(row: Row) -> str:
            at = graphs[row["network"], kind]
            if "refused" in at:
                return ""
            of_text = row["network"].startswith(("bert", "gpt2", "t5"))
            parts = of_text and at["least_in_parts"] < at["least"]
            return f"{at['least_in_parts' if parts else 'least'] / 1e9:.2f} GB{'*' if parts else ''}"

        def keep_all(row: Row) -> str:
            at = graphs[row["network"], kind]
            return "refused" if "refused" in at else f"{at['keep_all'] / 1e9:.2f} GB"

        return keep_all, least

    (all32, least32), (all16, least16) = sizes("float32"), sizes("bfloat16")
    of_gpu: dict[str, Column] = {"network": "{network}", "keep all, float32": all32, "smallest": least32}
    of_gpu |= {"keep all, bfloat16": all16, "smallest budget": least16}
    largest: dict[str, Column] = {
        "network": "{network}",
        "keep all": "{keep_all}",
        "planned": "{size}",
        "times as many": "{ratio:.2f}",
        "one more": "{next_size}",
    }
    (vgg,) = (row for row in rows_of("largest_batch", "network").values() if row["paper_ratio"])
    drawn = graphs[picture.NETWORK, "float32"]
    return {
        "solve-auto": table(plans, smallest.values()),
        "gpu-graphs": table(of_gpu, [row for (_, kind), row in graphs.items() if kind == "float32"]),
        "largest-batch": table(largest, rows_of("largest_batch", "network").values(), "one more"),
        "largest-paper": f"{vgg['paper_ratio']:.2f}",
        "estimates-half": f"{roofline.HALF_WITHIN:.0%}",
        "estimates-worst": f"{roofline.WORST:.0%}",
        "picture-overhead": f"{drawn['overhead_at_half']:.1%}",
    }


def other_memories() -> dict[str, str]:
    """A second memory, a model in a file, in the RAM of a small GPU or at home there, and ranks."""
    planned = read(RESULTS / "second_memory.jsonl")
    found = {(row["network"], row["method"]): row for row in second_memory.in_order(planned) if row["share"] == 0.3}
    told = dict[str, str]()
    for network, method in (("gpt2-48", second_memory.ALONE), ("gpt2-48", "auto"), ("gpt2-12", "auto")):
        told[f"second-{network}-{method}"] = f"{found[network, method]['cost_ratio'] - 1:.1%}"
    for way, row in rows_of("second_memory_measured", "network", "way").items():
        if way[0] == "gpt2":
            told[f"second-measured-{re.sub(r'[^a-z]', '', way[1])}"] = f"{row['time_ratio']:.2f}"
    (in_file,) = rows_of("in_file", "limit_bytes").values()
    for name in ("homes", "limit", "budget"):
        told[f"in-file-{name}"] = format_bytes(in_file[f"{name}_bytes"])
    told |= {f"in-file-{name}": format_bytes(in_file[name]) for name in ("peak", "first_peak")}
    told |= {f"in-file-{name}": f"{in_file[name]:.1f} s" for name in ("seconds", "plain_seconds")}
    fits: dict[str, Column] = {
        "samples x tokens of a call": lambda row: "{} x {:,}".format(*map(int, row["call"].split("x"))),
        "RAM": lambda row: f"{row['host_bytes'] / 1e9:.1f} GB",
        "speed": "{speed:.2f}",
        "no plan above": "{speed_bound:.2f}",
        "seconds after the trace": lambda row: f"{row['seconds'] - row['trace_seconds']:.0f}",
    }
    of_ram = [row for row in rows_of("fits", "call", "device").values() if row["device"] == "rtx4090"]
    told["fits-llama"] = table(fits, of_ram)
    told["homes-sums"] = homes.sums(read(RESULTS / "homes_measured.jsonl"))
    of_ranks, within = sharded.in_order(read(RESULTS / "sharded.jsonl")), 40 * 10**9
    for link in ("NVLink", "network"):
        fit = [row for row in of_ranks if row["link"] == link and row["peak"] <= within]
        ours = [row for row in fit if row["method"] == sharded.AUTO and row["budget"] == within]
        theirs = [row for row in fit if row["method"] != sharded.AUTO]
        for name, rows in (("ours", ours), ("theirs", theirs)):
            told[f"sharded-{link.lower()}-{name}"] = cell(min(rows, key=lambda row: row["cost_ratio"]), sharded.STEP)
        told[f"sharded-{link.lower()}-gap"] = f"{ours[0]['gap']:.1%}"
    return told


def machine() -> dict[str, str]:
    """Bytes that the machine gives, in an arena and within a hard limit."""
    rows = rows_of("arena", "model", "threads", "share")
    wide = next(row for row in rows.values() if row["model"] == "wide")
    others = [row for row in rows.values() if row["model"] != "wide"]
    told = {
        f"arena-{name}": to(row[f"{kind}_growth"] / row["planned_bytes"] for row in others)
        for name, kind in (("malloc", "allocator"), ("bytes", "arena"))
    }
    told["arena-time"] = to(row["time_ratio"] for row in others)
    told["arena-wide"] = f"{wide['plain_ratio']:.2f}"
    limits = rows_of("hard_limit", "way")
    told |= {f"limit-{way}": f"{limits[way]['growth'] / 1e6:.0f} MB" for way in ("plain", "allocator")}
    told["limit-planned"] = f"{limits['arena']['planned_bytes'] / 1e6:.0f} MB"
    told["limit-steps"] = str(limits["arena"]["trained"])
    return told


def how_it_works() -> dict[str, str]:
    """Orders of sums, ops that run graphs, and the stages of `auto`."""
    orders = {
        (row["capability"], row["terms"], row["dtype"]): row["cancelling"]
        for row in read(RESULTS / "orders.jsonl")
        if row["case"] == "orders"
    }
    told = {f"orders-{on.lower()}": f"{orders[on, 64, 'bfloat16']:.1%}" for on in ("AVX512", "AVX2")}
    higher = rows_of("higher_order", "network", "form")
    for form in ("pinned", "free"):
        told[f"higher-{form}"] = f"{higher['llama, both', form]['smallest'] / 1e9:.2f} GB"
    cases = [case for (_, _, limit), case in stages.latest(read(RESULTS / "stages.jsonl")).items() if limit == 5]
    wider = [case["bound"]["gap"] - case[""]["gap"] for case in cases]
    firsts = [case["next-use"]["first_plan_seconds"] / case[""]["first_plan_seconds"] for case in cases]
    told |= {"stages-first": f"{statistics.median(firsts):.2f}"}
    told |= {"stages-wider": f"{sum(more > stages.WORSE for more in wider)} of {len(cases)}"}
    told["stages-gap"] = f"{max(wider):.1%}"
    return told


def what_works() -> dict[str, str]:
    """Versions of PyTorch, Pythons, and the census of architectures."""
    rows = census.by_model(RESULTS / "census.jsonl")
    tried, others = read(versions.RESULTS), read(versions.OTHERS)

    def listed(key: str, rows: Sequence[Row]) -> str:
        found = {row[key].rpartition(".")[0] for row in rows if not row["failed"]}
        *first, last = sorted(found, key=lambda version: int(version.partition(".")[2]))
        return f"{', '.join(first)} and {last}"

    return {
        "versions-torch": listed("torch", tried),
        "versions-python": listed("python", [*tried, *others]),
        "census": census.counts(rows),
    }


def figures() -> dict[str, str]:
    """The text of each figure that a page may show, by its name."""
    told: dict[str, str] = {}
    for part in (
        *(beside_others, first_steps, changing_lengths, smallest_budgets, whole_steps, at_full_size),
        *(other_memories, machine, how_it_works, what_works),
    ):
        told |= part()
    return told


def filled(text: str, known: Mapping[str, str]) -> str:
    """The text of a page with its figures as they are known.

    Raises:
        ValueError: if a name is not known, or a figure within a paragraph begins a line, where Markdown ends the
            paragraph.
    """

    def written(match: re.Match[str]) -> str:
        name, is_table = match[1], match[2].startswith("\n")
        if name not in known:
            raise ValueError(f"There is no figure {name!r}; there are {', '.join(sorted(known))}.")
        if not is_table and not text[: match.start()].rpartition("\n")[2].strip():
            raise ValueError(f"The figure {name!r} begins a line: break the line elsewhere.")
        around = "\n\n" if is_table else ""
        return f"<!--{name}-->{around}{known[name]}{around}<!---->"

    return MARKED.sub(written, text)


def names_on(pages: Sequence[Path]) -> list[str]:
    """The names of all figures that pages show."""
    return [match[1] for page in pages for match in MARKED.finditer(page.read_text())]


def main() -> None:
    """Write the pages, and say which have changed."""
    documented(__doc__).parse_args()
    known = figures()
    for page in PAGES:
        text = page.read_text()
        new = filled(text, known)
        if new != text:
            page.write_text(new)
            print(page.relative_to(ROOT))
    if unused := known.keys() - {*names_on(PAGES)}:
        print("on no page:", *sorted(unused))


if __name__ == "__main__":
    main()
