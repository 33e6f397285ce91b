#!/usr/bin/env python3
"""Measures and draws the charts of docs/PERFORMANCE.md.

    python3 docs/charts/draw.py             # draws them from the two JSON files beside this script
    python3 docs/charts/draw.py --measure   # measures first: about five minutes on an idle machine
"""

import json
import math
import re
import subprocess
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE.parents[1] / "target/release"
COMPARE, LATENCY = HERE / "compare.json", HERE / "latency.json"
# Pairs of add and del a second, as shares of what the sidecar can do without a limit.
SHARES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1b2127 }
  .title { font-weight: 600; font-size: 15px } .quiet { fill: #59636e }
  .slot { fill: #eceff1 } .pointer { fill: #b4761c } .own { fill: #0a7a70 } .other { fill: #9aa5af } line { stroke: #d8dde2 }
  polyline { fill: none; stroke-width: 2 } .p50 { stroke: #0a7a70 } .p99 { stroke: #b4761c } .p999 { stroke: #b2401d }
  @media (prefers-color-scheme: dark) {
    text { fill: #e7ecf0 } .quiet { fill: #98a4af } .own { fill: #45b8ab } .other { fill: #5b6670 } line { stroke: #343c44 }
    .slot { fill: #1d242b } .pointer { fill: #e0a850 } .p50 { stroke: #45b8ab } .p99 { stroke: #e0a850 } .p999 { stroke: #ee7c5a }
  }
"""
WIDTH = 720


def svg(title, height, body):
    """A drawing with a title, for light and dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">\n'
        f'<style>{STYLE}</style>\n<text class="title" x="8" y="24">{escape(title)}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def bars(title, rows, show):
    """Horizontal bars; `rows` are (name, value, whether it is ackwheel)."""
    left, room, longest = 290, 340, max(value for _, value, _ in rows)
    body = []
    for y, (name, value, own) in zip(range(44, 10_000, 30), rows):
        length = max(2, room * value / longest)
        body.append(f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        body.append(f'<rect class="{"own" if own else "other"}" x="{left}" y="{y}" width="{length:.1f}" height="20" rx="2"/>')
        body.append(f'<text x="{left + length + 8:.1f}" y="{y + 15}">{show(value)}</text>')
    return svg(title, 56 + 30 * len(rows), body)


def lines(title, reports):
    """The quantiles of the latency in microseconds over the rate, both logarithmic."""
    left, right, top, bottom = 70, 610, 50, 290
    rates = [report["rate"] for report in reports]
    series = {name: [report["latency_us"]["add"][name] for report in reports] for name in ("p999", "p99", "p50")}
    decades = range(math.floor(math.log10(min(series["p50"]))), math.ceil(math.log10(max(series["p999"]))) + 1)
    lowest, highest = math.log10(rates[0]), math.log10(rates[-1])
    place_x = lambda rate: left + (right - left) * (math.log10(rate) - lowest) / (highest - lowest)
    place_y = lambda value: bottom - (bottom - top) * (math.log10(value) - decades[0]) / (decades[-1] - decades[0])
    body = []
    for decade in decades:
        y = place_y(10**decade)
        label = f"{10**decade:,} µs" if decade < 3 else f"{10 ** (decade - 3):,} ms"
        body.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="quiet" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for rate in rates:
        body.append(f'<text class="quiet" x="{place_x(rate):.1f}" y="{bottom + 22}" text-anchor="middle">{short(rate)}</text>')
    body.append(f'<text class="quiet" x="{(left + right) / 2}" y="{bottom + 44}" text-anchor="middle">pairs of add and del a second</text>')
    for name, values in series.items():
        points = [(place_x(rate), place_y(value)) for rate, value in zip(rates, values)]
        body.append(f'<polyline class="{name}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
        x, y = points[-1]
        body.append(f'<text x="{x + 10:.1f}" y="{y + 4:.1f}">{"p99.9" if name == "p999" else name}</text>')
    return svg(title, bottom + 60, body)


def short(count):
    """A count as on an axis: 20K, 1.5M."""
    for unit, size in (("M", 1_000_000), ("K", 1_000)):
        if count >= size:
            return f"{count / size:.2g}{unit}" if count < 100 * size else f"{count / size:.0f}{unit}"
    return f"{count:.0f}"


def ring():
    """The ring of fifteen slots, with a label for each part."""
    centre, inner, outer, at_pointer = (190, 190), 78, 140, 3

    def point(radius, slot):
        angle = math.tau * slot / 15 - math.pi / 2
        return f"{centre[0] + radius * math.cos(angle):.1f} {centre[1] + radius * math.sin(angle):.1f}"

    body = []
    for slot in range(15):
        begin, end, age = slot - 0.46, slot + 0.46, (at_pointer - slot) % 15
        fill = max(0.2, math.exp(-age / 2.5))
        for name, top in (("slot", outer), ("own", inner + (outer - inner) * fill)):
            body.append(
                f'<path class="{name}" d="M{point(inner, begin)} L{point(top, begin)} A{top:.1f} {top:.1f} 0 0 1 {point(top, end)} '
                f'L{point(inner, end)} A{inner} {inner} 0 0 0 {point(inner, begin)}"/>'
            )
        x, y = point(inner - 14, slot).split()
        body.append(f'<text class="quiet" x="{x}" y="{float(y) + 4:.1f}" text-anchor="middle">{slot}</text>')
    tip, *base = point(52, at_pointer), point(36, at_pointer - 0.7), point(36, at_pointer + 0.7)
    body.append(f'<path class="pointer" d="M{tip} L{base[0]} L{base[1]} Z"/>')
    labels = (
        (3, 50, "The pointer is at this slot. New messages enter here:", "the pointer comes back after a revolution, 15 s."),
        (3.4, 115, "Closing: the messages that the slot held before. They", "can be acknowledged until the pointer moves on;", "the others time out then."),
        (4, 200, "One second from now the pointer is here.", "Most messages of this slot are acknowledged already."),
        (7, 270, "Each slot holds the messages of one tick:", "tick → msg_ids, and beside it msg_id → tick."),
    )
    for slot, y, *texts in labels:
        x, start = point(outer - 8, slot).split()
        body.append(f'<line x1="{x}" y1="{start}" x2="352" y2="{y}"/>')
        for offset, text in zip((-2, 16, 34), texts):
            body.append(f'<text x="358" y="{y + offset}">{escape(text)}</text>')
    return svg("The ring of 15 ticks", 350, body)


def draw():
    """Draws all charts from the JSON files."""
    medians = {
        (row["subject"], row["figure"]): row["median"]
        for part in json.loads(COMPARE.read_text())["parts"]
        for row in part["rows"]
    }

    def rows(figure, subjects):
        return [(name, medians[subject, figure], own) for name, subject, own in subjects]

    wire = [
        ("ackwheel, memory store", "memory, 8 x 256", True),
        ("Redis by hand, ZADD and ZREM", "Redis ZADD, ZREM, 8 x 256", False),
        ("Redis by hand, HSET + SADD and back", "Redis HSET + SADD and back, 8 x 256", False),
        ("ackwheel, Redis store", "sidecar on Redis, 8 x 256", True),
        ("beanstalkd, put and delete", "beanstalkd put, delete, 8 x 256", False),
    ]
    in_process = [
        ("ackwheel's ring, 1M in flight", "ring", True),
        ("… 10M in flight", "ring, ten times as many", True),
        ("hashbrown alone, 1M", "hashbrown alone", False),
        ("… 10M", "hashbrown alone, ten times as many", False),
        ("dashmap alone, 1M", "dashmap alone", False),
        ("tokio's DelayQueue and a map, 1M", "DelayQueue and its map of keys", False),
    ]
    charts = {
        "throughput": bars("Pairs of add and del a second through TCP", rows("pairs/s", wire), short),
        "ring": ring(),
        "in-process": bars("Nanoseconds a pair of add and del in the process", rows("ns a pair", in_process), lambda ns: f"{ns:.0f} ns"),
        "latency": lines("Latency of AddNewMsg by load, memory store", json.loads(LATENCY.read_text())),
    }
    for name, chart in charts.items():
        (HERE / f"{name}.svg").write_text(chart)


def measure():
    """Measures on this machine, and writes the JSON files."""
    run = lambda *command: subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    run("cargo", "build", "--release", "--locked", "--bins", "--example", "compare")
    COMPARE.write_text(run(TARGET / "examples/compare", "--only", "ring,wire", "--rounds", "3", "--run", "1s", "--json"))
    command = [TARGET / "ackwheel", "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as sidecar:
        try:
            address = re.search(r"listen=(\S+)", sidecar.stderr.readline())[1]
            bench = [TARGET / "ackwheel", "bench", "--json", "--addr", address, "--connections", "64", "--seconds", "4"]
            limit = json.loads(run(*bench))["pairs_per_second"]
            rates = [round(limit * share, -3) for share in SHARES]
            measured = lambda rate: [json.loads(run(*bench, "--rate", f"{rate:.0f}")) for _ in range(3)]
            p99 = lambda report: report["latency_us"]["add"]["p99"]
            reports = [sorted(measured(rate), key=p99)[1] for rate in rates]
        finally:
            sidecar.terminate()
            sidecar.stderr.read()
    LATENCY.write_text(json.dumps(reports, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--measure"]):
        sys.exit(__doc__)
    if sys.argv[1:]:
        measure()
    draw()
