"""A flame graph in one SVG file: no network, no other file; a browser shows, zooms and searches it.

The root is at the top, widths are time, frames of one parent are in the order of their names. Of two profiles widths
are those of the second; red has become more, blue less.
"""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape

from argus.model.stacks import Frame
from argus.model.text import printable
from argus.model.units import duration
from argus.semantics.stacks.profile import Change, Difference, Key, Profile, changes, folded, frame_text

WIDTH = 1200
_MARGIN, _ROW, _FONT = 10, 17, 11
_CHARACTER = 6.65
"""Width of a character of the font, which is a monospace one of 11 px."""
_TOP = 76
NARROWEST = 1e-4
"""Share of the whole below which a frame is not drawn."""
_LISTED = 12
"""Frames in each table of a difference."""

_HUES = {"python": (204, 62), "native": (38, 72), "jit": (285, 45), "kernel": (8, 68), "marker": (0, 0)}
"""Hue and saturation by kind of frame."""
_MORE, _SAME, _LESS = (0, 80, 62), (0, 0, 92), (215, 80, 62)
"""Hue, saturation and lightness of what has come, stayed and gone."""
_LEGEND = {
    "python": "Python",
    "native": "compiled",
    "jit": "compiled at run time",
    "kernel": "kernel",
    "marker": "note",
}


@dataclass
class _Node:
    frame: Frame | None
    after: float = 0.0
    before: float = 0.0
    children: dict[Frame, _Node] = field(default_factory=dict)


def write_svg(profile: Profile) -> str:
    """A flame graph.

    Args:
        profile: What is drawn; its title and subtitle are shown.
    """
    root = _tree(folded(profile.samples), {})
    waits = {sample.kind for sample in profile.samples} == {"off"}
    unit = "time off the CPU" if waits else "time"
    return _document(root, profile.title, [profile.subtitle], unit, None)


def write_difference(two: Difference, profile: Profile, base: str) -> str:
    """A flame graph of what is shown, coloured by how it differs from what it is compared with, and a table.

    Args:
        two: The two on one scale.
        profile: What is shown.
        base: What it is compared with, in words.
    """
    root = _tree(two.after, two.before)
    lines = [f"{profile.subtitle}", f"compared with: {base}"]
    return _document(root, profile.title, lines, f"time {two.unit}", changes(two))


def _tree(after: Mapping[Key, float], before: Mapping[Key, float]) -> _Node:
    root = _Node(None)
    for frames, value in after.items():
        root.after += value
        node = root
        for frame in frames:
            node = node.children.setdefault(frame, _Node(frame))
            node.after += value
    for frames, value in before.items():
        root.before += value
        node = root
        for frame in frames:
            node = node.children.setdefault(frame, _Node(frame))
            node.before += value
    return root


def _document(root: _Node, title: str, subtitle: list[str], unit: str, table: list[Change] | None) -> str:
    boxes: list[str] = []
    deepest, hidden, hidden_time = 0, 0, 0.0
    whole = root.after or 1.0
    pending: list[tuple[_Node, int, float]] = [(root, 0, 0.0)]
    while pending:
        node, depth, start = pending.pop()
        if node.after < NARROWEST * whole:
            # What is gone has no width: the tables have it.
            hidden += node.after > 0
            hidden_time += node.after
            continue
        deepest = max(deepest, depth)
        boxes.append(_box(node, root, depth, start / whole, unit, table is not None))
        offset = start
        for frame in sorted(node.children, key=lambda f: (f.function, f.file, f.line, f.kind)):
            pending.append((node.children[frame], depth + 1, offset))
            offset += node.children[frame].after
    bottom = _TOP + (deepest + 1) * _ROW
    below: list[str] = []
    if hidden:
        below.append(
            f"{hidden:,} branches narrower than {NARROWEST:.2%} are not drawn ({hidden_time / whole:.2%} of the time)"
        )
    rows = [_text(_MARGIN, bottom + 18 + n * 15, line) for n, line in enumerate(below)]
    bottom += 12 + 15 * len(below)
    if table is not None:
        shown, bottom = _table(table, bottom + 10, root)
        rows += shown
    height = bottom + 20
    words = [title, *(line for line in subtitle if line)]
    heading = [_text(WIDTH / 2, 20, words[0], cls="title", anchor="middle")]
    heading += [_text(WIDTH / 2, 37 + 15 * n, _cut(line, 170), anchor="middle") for n, line in enumerate(words[1:])]
    total = f"{duration(root.after)} of {unit}" + (f", before: {duration(root.before)}" if table is not None else "")
    heading.append(_text(_MARGIN, _TOP - 6, total))
    return "\n".join(
        [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" version="1.1" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" data-width="{WIDTH - 2 * _MARGIN}" data-left="{_MARGIN}">',
            f"<title>{_xml(title)}</title>",
            f"<style>{_STYLE}</style>",
            '<rect width="100%" height="100%" fill="#fdfdfd"/>',
            *heading,
            *_legend(table is not None),
            _text(_MARGIN, 20, "Reset zoom", cls="button", ident="reset"),
            _text(WIDTH - _MARGIN, 20, "Search", cls="button", anchor="end", ident="search"),
            _text(WIDTH - _MARGIN, _TOP - 6, " ", anchor="end", ident="found"),
            '<g id="frames">',
            *boxes,
            "</g>",
            *rows,
            f"<script><![CDATA[{_SCRIPT}]]></script>",
            "</svg>",
            "",
        ]
    )


def _box(node: _Node, root: _Node, depth: int, start: float, unit: str, compared: bool) -> str:
    share = node.after / (root.after or 1.0)
    name = frame_text(node.frame) if node.frame is not None else "all"
    about = [f"{duration(node.after)} ({share:.2%}) {unit}"]
    if node.frame is not None and node.frame.kind != "python" and node.frame.file:
        about.insert(0, node.frame.file)
    elif node.frame is not None and node.frame.file:
        about.insert(0, f"{node.frame.file}" + (f":{node.frame.line}" if node.frame.line else ""))
    if compared:
        about.append(f"before: {duration(node.before)}, {_signed(node.after - node.before)}")
    fill = _difference_colour(node) if compared else _colour(node.frame)
    left, width = _MARGIN + start * (WIDTH - 2 * _MARGIN), share * (WIDTH - 2 * _MARGIN)
    top = _TOP + depth * _ROW
    room = int((width - 4) / _CHARACTER)
    text = name if len(name) <= room else name[: room - 2] + ".." if room >= 3 else ""
    lines = "\n".join(map(_xml, [name, *about]))
    return (
        f'<g class="f" data-x="{start:.7f}" data-w="{share:.7f}" data-d="{depth}">'
        f"<title>{lines}</title>"
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 1}" fill="{fill}"/>'
        f'<text x="{left + 3:.2f}" y="{top + 12}">{_xml(text)}</text></g>'
    )


def _colour(frame: Frame | None) -> str:
    if frame is None:
        return "#d8d8d8"
    hue, saturation = _HUES.get(frame.kind, _HUES["marker"])
    # By the name, so that a function looks the same wherever it is, and in every graph.
    spread = zlib.crc32(frame.function.encode("utf-8", "backslashreplace"))
    return _rgb(hue + spread % 18 - 9, saturation, 68 + spread // 18 % 14)


def _rgb(hue: float, saturation: float, lightness: float) -> str:
    # Not as hsl(): browsers know that, converters and office programs often do not.
    parts = colorsys.hls_to_rgb(hue % 360 / 360, lightness / 100, saturation / 100)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _difference_colour(node: _Node) -> str:
    most = max(node.before, node.after)
    change = (node.after - node.before) / most if most else 0.0
    hue = (_MORE if change > 0 else _LESS)[0]
    return _rgb(hue, 80 * abs(change), 92 - 30 * abs(change))


def _legend(compared: bool) -> list[str]:
    if compared:
        words = {_rgb(*_MORE): "more than before", _rgb(*_SAME): "the same", _rgb(*_LESS): "less"}
    else:
        words = {_rgb(*_HUES[kind], 74): word for kind, word in _LEGEND.items()}
    out, left = [], WIDTH - _MARGIN - 540.0
    for colour, word in words.items():
        out.append(f'<rect x="{left:.0f}" y="{_TOP - 15}" width="10" height="10" fill="{colour}"/>')
        out.append(_text(left + 14, _TOP - 6, word))
        left += 26 + _CHARACTER * len(word)
    return out


def _table(rows_shown: list[Change], top: float, root: _Node) -> tuple[list[str], int]:
    # Less than a thousandth of everything is noise.
    worth = 1e-3 * max(root.after, root.before)
    gained = [change for change in rows_shown if change.gained > worth][:_LISTED]
    lost = [change for change in reversed(rows_shown) if change.gained < -worth][:_LISTED]
    rows = []
    y = top
    for title, listed in (("gained most", gained), ("lost most", lost)):
        y += 20
        rows.append(_text(_MARGIN, y, f"{title} (time in the frame itself)", cls="head"))
        for name, x in (("before", 760), ("after", 880), ("change", 1000), ("with callees", 1180)):
            rows.append(_text(x, y, name, cls="head", anchor="end"))
        if not listed:
            y += 15
            rows.append(_text(_MARGIN, y, "none"))
        for change in listed:
            y += 15
            rows.append(_text(_MARGIN, y, _cut(frame_text(change.frame), 95)))
            for value, x in (
                (duration(change.self_before), 760),
                (duration(change.self_after), 880),
                (_signed(change.gained), 1000),
                (_signed(change.total_after - change.total_before), 1180),
            ):
                rows.append(_text(x, y, value, anchor="end"))
        y += 8
    return rows, int(y)


def _signed(ns: float) -> str:
    return ("+" if ns >= 0 else "") + duration(ns)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 2] + ".."


def _xml(text: str) -> str:
    return escape(printable(text), quote=True)


def _text(x: float, y: float, text: str, *, cls: str = "", anchor: str = "", ident: str = "") -> str:
    marks = "".join(f' {k}="{v}"' for k, v in (("class", cls), ("text-anchor", anchor), ("id", ident)) if v)
    return f'<text x="{x:g}" y="{y:g}"{marks}>{_xml(text)}</text>'


_STYLE = (
    f"text{{font-family:DejaVu Sans Mono,Menlo,Consolas,monospace;font-size:{_FONT}px;fill:#222}}"
    ".title{font-size:15px;font-weight:bold}.head{font-weight:bold}.button{cursor:pointer;fill:#1a5fb4}"
    ".f{cursor:pointer}.f text{pointer-events:none}.f:hover rect{stroke:#222;stroke-width:1}"
    ".f.match rect{fill:#e85fe0}.f.above rect{opacity:.5}"
)

# Names are read from the elements that show them: nothing of the data is part of the program.
_SCRIPT = """
(function () {
  "use strict";
  var svg = document.documentElement, frames = Array.prototype.slice.call(document.querySelectorAll("g.f"));
  var width = +svg.dataset.width, left = +svg.dataset.left, from = 0, span = 1;
  var boxes = frames.map(function (g) {
    return {g: g, x: +g.dataset.x, w: +g.dataset.w, d: +g.dataset.d, rect: g.querySelector("rect"),
            text: g.querySelector("text"), name: g.querySelector("title").textContent.split("\\n")[0]};
  });
  function fit(name, pixels) {
    var room = Math.floor((pixels - 4) / 6.65);
    return name.length <= room ? name : room >= 3 ? name.slice(0, room - 2) + ".." : "";
  }
  function zoom(x, w, depth) {
    var small = 1e-6;
    from = x; span = w;
    boxes.forEach(function (b) {
      var above = b.d < depth && b.x <= x + small && b.x + b.w >= x + w - small;
      var inside = b.d >= depth && b.x >= x - small && b.x + b.w <= x + w + small;
      b.g.style.display = above || inside ? "" : "none";
      b.g.classList.toggle("above", above && depth > 0);
      if (!above && !inside) return;
      var start = above ? 0 : (b.x - x) / w, part = above ? 1 : Math.min(b.w / w, 1);
      b.rect.setAttribute("x", left + start * width);
      b.rect.setAttribute("width", Math.max(part * width, 0));
      b.text.setAttribute("x", left + start * width + 3);
      b.text.textContent = fit(b.name, part * width);
    });
  }
  function search(words) {
    var found = document.getElementById("found"), pattern = null, spans = [], sum = 0, end = -1;
    try { pattern = words ? new RegExp(words) : null; } catch (wrong) {
      found.textContent = "not a regular expression";
      return;
    }
    boxes.forEach(function (b) {
      var hit = pattern !== null && b.d > 0 && pattern.test(b.name);
      b.g.classList.toggle("match", hit);
      if (hit) spans.push([b.x, b.x + b.w]);
    });
    spans.sort(function (a, b) { return a[0] - b[0] || b[1] - a[1]; });
    spans.forEach(function (s) {
      if (s[1] > end) { sum += s[1] - Math.max(s[0], end); end = s[1]; }
    });
    found.textContent = pattern === null ? " " : "found: " + (100 * sum).toFixed(2) + " %";
  }
  boxes.forEach(function (b) { b.g.addEventListener("click", function () { zoom(b.x, b.w, b.d); }); });
  document.getElementById("reset").addEventListener("click", function () { zoom(0, 1, 0); search(""); });
  document.getElementById("search").addEventListener("click", function () {
    search(window.prompt("Search function names (a regular expression):") || "");
  });
  document.addEventListener("keydown", function (key) {
    if ((key.ctrlKey || key.metaKey) && key.key === "f") {
      key.preventDefault();
      search(window.prompt("Search function names (a regular expression):") || "");
    } else if (key.key === "Escape") { zoom(0, 1, 0); search(""); }
  });
  window.argusFlame = {zoom: zoom, search: search};
})();
"""
