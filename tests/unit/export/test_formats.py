"""Exported files, read back by other means: folded text, speedscope, pprof, SVG; with names as hostile as they come."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from argus.export import svg
from argus.export.folded import write_difference as folded_difference
from argus.export.folded import write_folded
from argus.export.pprof import write_pprof
from argus.export.speedscope import write_speedscope
from argus.model.stacks import Frame
from argus.model.text import printable
from argus.model.units import duration
from argus.semantics.stacks.profile import Profile, Sample, changes, difference, frame_text
from tests.builders.stack_data import MS, native, py

HOSTILE = [
    "<script>alert('x')</script>", '"><svg onload=alert(1)>', "]]></script><script>alert(2)//", "a;b 7", "&amp;",
    "\0\x1b[31m", "line\nbreak\r\n", "naïve🙂", "\udcff\ud800", "\u202eabc", "\ufffe\uffff", "{\"}\\", "' OR 1",
    "std::map<int, a<b>>::f(int&&)",
]  # fmt: skip
MAIN, STEP, FORWARD, LOAD = py("main", 1), py("step", 20), py("forward", 30, "/app/llama/model.py"), py("load", 7)


def profile(*samples: Sample, **fields: Any) -> Profile:
    return Profile(list(samples), title="llama", subtitle="run 1, all ranks", **fields)


SIMPLE = profile(
    Sample((MAIN, STEP, FORWARD, native("sgemm", "/lib/libblas.so")), 700 * MS, 70, "cpu", 0, "python", 40),
    Sample((MAIN, STEP), 200 * MS, 20, "cpu", 0, "python", 40),
    Sample((MAIN, LOAD, Frame("marker", "(waiting: read)")), 90 * MS, 3, "off", 1, "python", 50),
    Sample((MAIN, STEP, FORWARD, native("sgemm", "/lib/libblas.so")), 10 * MS, 1, "cpu", 1, "python", 50),
    begin_ns=10**18, end_ns=10**18 + 10**9, period_ns=10 * MS,
)  # fmt: skip
NASTY = profile(
    *(
        Sample((MAIN, py(name, 3, f"/x/{name}.py"), native(name, name)), (n + 1) * MS, 1, "cpu", 0, name)
        for n, name in enumerate(HOSTILE)
    )
)  # fmt: skip


# ---- folded


def test_folded() -> None:
    assert "".join(write_folded(SIMPLE)) == (
        "main (app/train.py:1);step (app/train.py:20);forward (llama/model.py:30);sgemm (libblas.so) 710000\n"
        "main (app/train.py:1);step (app/train.py:20) 200000\n"
        "main (app/train.py:1);load (app/train.py:7);(waiting: read) 90000\n"
    )


def test_folded_lines_are_read_back_whatever_the_names() -> None:
    lines = list(write_folded(NASTY))
    assert len(lines) == len(HOSTILE)
    for line in lines:
        match = re.fullmatch(r"(.*) (\d+)\n", line)  # as flamegraph.pl reads them
        assert match
        assert len(match[1].split(";")) == 3
        line.encode()
    assert sum(int(line.split()[-1]) for line in lines) == NASTY.total_ns // 1000


def test_folded_weights_are_never_lost_to_rounding() -> None:
    assert list(write_folded(profile(Sample((MAIN,), 300, 1), Sample((STEP,), 0, 0)))) == ["main (app/train.py:1) 1\n"]
    assert list(write_folded(profile())) == []


# ---- speedscope

SPEEDSCOPE = {
    "type": "object",
    "required": ["$schema", "shared", "profiles"],
    "properties": {
        "$schema": {"const": "https://www.speedscope.app/file-format-schema.json"},
        "name": {"type": "string"}, "exporter": {"type": "string"}, "activeProfileIndex": {"type": "number"},
        "shared": {
            "type": "object", "required": ["frames"], "additionalProperties": False,
            "properties": {
                "frames": {
                    "type": "array",
                    "items": {
                        "type": "object", "required": ["name"], "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string"}, "file": {"type": "string"}, "line": {"type": "number"},
                            "col": {"type": "number"},
                        },
                    },
                }
            },
        },
        "profiles": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "name", "unit", "startValue", "endValue", "samples", "weights"],
                "additionalProperties": False,
                "properties": {
                    "type": {"const": "sampled"}, "name": {"type": "string"},
                    "unit": {"enum": ["none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"]},
                    "startValue": {"type": "number"}, "endValue": {"type": "number"},
                    "samples": {
                        "type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    },
                    "weights": {"type": "array", "items": {"type": "number"}},
                },
            },
        },
    },
    "additionalProperties": False,
}  # fmt: skip
"""What speedscope's file-format-spec.ts says of sampled profiles."""


@pytest.mark.parametrize("given", [SIMPLE, NASTY, profile()])
def test_speedscope_files_follow_the_format(given: Profile) -> None:
    found = json.loads(write_speedscope(given))
    jsonschema.validate(found, SPEEDSCOPE)
    frames = found["shared"]["frames"]
    for one in found["profiles"]:
        assert len(one["samples"]) == len(one["weights"])
        assert one["endValue"] - one["startValue"] == sum(one["weights"])
        assert all(number < len(frames) for sample in one["samples"] for number in sample)
    assert sum(one["endValue"] for one in found["profiles"]) == given.total_ns


def test_speedscope_has_a_profile_a_thread() -> None:
    found = json.loads(write_speedscope(SIMPLE))
    assert [one["name"] for one in found["profiles"]] == ["rank 0 python (40)", "rank 1 python (50)"]
    first = found["profiles"][0]
    names = [[found["shared"]["frames"][number]["name"] for number in sample] for sample in first["samples"]]
    assert names == [["main", "step", "forward", "sgemm"], ["main", "step"]]
    assert first["weights"] == [700 * MS, 200 * MS]
    assert {"name": "forward", "file": "/app/llama/model.py", "line": 30} in found["shared"]["frames"]
    assert {"name": "sgemm", "file": "/lib/libblas.so"} in found["shared"]["frames"], "no line is not line 0"


# ---- pprof


def pprof_messages() -> Any:
    """Google's own decoder, taught profile.proto."""
    scalar = {"int64": 3, "uint64": 4, "bool": 8, "string": 9}
    layout = {
        "ValueType": [("type", 1, "int64"), ("unit", 2, "int64")],
        "Label": [("key", 1, "int64"), ("str", 2, "int64"), ("num", 3, "int64"), ("num_unit", 4, "int64")],
        "Sample": [("location_id", 1, "*uint64"), ("value", 2, "*int64"), ("label", 3, "*Label")],
        "Line": [("function_id", 1, "uint64"), ("line", 2, "int64"), ("column", 3, "int64")],
        "Location": [("id", 1, "uint64"), ("mapping_id", 2, "uint64"), ("address", 3, "uint64"), ("line", 4, "*Line"),
                     ("is_folded", 5, "bool")],
        "Function": [("id", 1, "uint64"), ("name", 2, "int64"), ("system_name", 3, "int64"), ("filename", 4, "int64"),
                     ("start_line", 5, "int64")],
        "Profile": [("sample_type", 1, "*ValueType"), ("sample", 2, "*Sample"), ("location", 4, "*Location"),
                    ("function", 5, "*Function"), ("string_table", 6, "*string"), ("drop_frames", 7, "int64"),
                    ("keep_frames", 8, "int64"), ("time_nanos", 9, "int64"), ("duration_nanos", 10, "int64"),
                    ("period_type", 11, "ValueType"), ("period", 12, "int64"), ("comment", 13, "*int64"),
                    ("default_sample_type", 14, "int64")],
    }  # fmt: skip
    file = descriptor_pb2.FileDescriptorProto(name="profile.proto", package="perftools", syntax="proto3")
    for name, fields in layout.items():
        message = file.message_type.add(name=name)
        for field, number, kind in fields:
            repeated, kind = kind.startswith("*"), kind.lstrip("*")
            added = message.field.add(name=field, number=number, label=3 if repeated else 1)
            added.type = scalar.get(kind, 11)
            if added.type == 11:
                added.type_name = f".perftools.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("perftools.Profile"))


def decoded(given: Profile) -> Any:
    found = pprof_messages()()
    found.ParseFromString(gzip.decompress(write_pprof(given)))
    size = found.ByteSize()
    found.DiscardUnknownFields()
    assert found.ByteSize() == size, "a field that profile.proto does not have"
    return found


def test_pprof_files_are_read_back_by_another_decoder() -> None:
    found = decoded(SIMPLE)
    words = list(found.string_table)
    assert words[0] == ""
    assert [(words[t.type], words[t.unit]) for t in found.sample_type] == [
        ("samples", "count"), ("cpu", "nanoseconds"), ("waits", "count"), ("off_cpu", "nanoseconds"),
    ]  # fmt: skip
    functions = {f.id: (words[f.name], words[f.filename]) for f in found.function}
    places = {p.id: (*functions[p.line[0].function_id], p.line[0].line) for p in found.location}
    assert 0 not in places
    assert not any(f.system_name for f in found.function), "pprof would demangle the names, and <module> is lost then"
    samples = [
        (
            [places[one] for one in sample.location_id],
            list(sample.value),
            {words[label.key]: words[label.str] for label in sample.label},
        )
        for sample in found.sample
    ]
    assert samples[0] == (
        [("sgemm", "/lib/libblas.so", 0), ("forward", "/app/llama/model.py", 30), ("step", "/app/train.py", 20),
         ("main", "/app/train.py", 1)],
        [70, 700 * MS, 0, 0],
        {"rank": "0", "tid": "40", "thread": "python"},
    )  # fmt: skip
    assert samples[2][1:] == ([0, 0, 3, 90 * MS], {"rank": "1", "tid": "50", "thread": "python"})
    assert (found.time_nanos, found.duration_nanos, found.period) == (10**18, 10**9, 10 * MS)
    assert (words[found.period_type.type], words[found.default_sample_type]) == ("cpu", "cpu")
    assert [words[n] for n in found.comment] == ["llama: run 1, all ranks"]


def test_pprof_with_hostile_names_and_large_numbers() -> None:
    found = decoded(NASTY)
    assert len(found.sample) == len(HOSTILE)
    assert {printable(name) for name in HOSTILE} <= set(found.string_table)
    large = decoded(profile(Sample((MAIN,), 2**62, 2**33, "off", 2**20, "t", 2**22)))
    assert list(large.sample[0].value) == [2**33, 2**62]
    words = list(large.string_table)
    assert [words[t.type] for t in large.sample_type] == ["waits", "off_cpu"]
    assert {words[label.key]: words[label.str] for label in large.sample[0].label}["rank"] == str(2**20)
    assert [len(decoded(profile()).sample), len(decoded(profile()).sample_type)] == [0, 2]


# ---- SVG

NAMESPACE = {"s": "http://www.w3.org/2000/svg"}


def boxes(text: str) -> dict[str, ElementTree.Element]:
    """Drawn frames by the first line of their title."""
    root = ElementTree.fromstring(text.encode())
    return {
        (frame.find("s:title", NAMESPACE).text or "").split("\n")[0]: frame  # type: ignore[union-attr]
        for frame in root.iterfind(".//s:g[@class='f']", NAMESPACE)
    }


def width(frame: ElementTree.Element) -> float:
    return float(frame.find("s:rect", NAMESPACE).get("width"))  # type: ignore[arg-type,union-attr]


def test_widths_are_shares_of_the_time() -> None:
    drawn = boxes(svg.write_svg(SIMPLE))
    whole = svg.WIDTH - 20
    assert width(drawn["all"]) == whole
    assert width(drawn["forward (llama/model.py:30)"]) == pytest.approx(whole * 0.71, abs=0.02)
    assert width(drawn["load (app/train.py:7)"]) == pytest.approx(whole * 0.09, abs=0.02)
    starts = {name: float(frame.get("data-x", "")) for name, frame in drawn.items()}
    assert starts["load (app/train.py:7)"] == 0  # by name: load before step
    assert starts["step (app/train.py:20)"] == pytest.approx(0.09)
    colours = {name: frame.find("s:rect", NAMESPACE).get("fill") for name, frame in drawn.items()}  # type: ignore[union-attr]
    assert len({colours["sgemm (libblas.so)"], colours["main (app/train.py:1)"], colours["(waiting: read)"]}) == 3


def test_the_graph_says_what_it_shows() -> None:
    text = svg.write_svg(SIMPLE)
    shown = "".join(ElementTree.fromstring(text.encode()).itertext())
    for words in ("llama", "run 1, all ranks", "1,000 ms of time", "710 ms", "(71.00%)", "Search", "Reset zoom"):
        assert words in shown
    assert "time off the CPU" in svg.write_svg(profile(Sample((MAIN,), MS, 1, "off")))


def test_hostile_names_stay_text() -> None:
    text = svg.write_svg(Profile(NASTY.samples, title=HOSTILE[0], subtitle=HOSTILE[2]))
    root = ElementTree.fromstring(text.encode())  # well-formed, however nasty
    assert len(root.findall(".//s:script", NAMESPACE)) == 1
    assert text.count("<script") == 1
    assert text.count("]]>") == 1
    assert not [e for e in root.iter() if any(name.lower().startswith("on") for name in e.attrib)]
    drawn = boxes(text)
    for name in HOSTILE:
        assert any(found.startswith(printable(name)) for found in drawn), name
    allowed = {"svg", "title", "style", "rect", "text", "g", "script"}
    assert {e.tag.rpartition("}")[2] for e in root.iter()} == allowed


def test_it_works_without_a_network() -> None:
    text = svg.write_svg(SIMPLE)
    assert set(re.findall(r"https?://[^\"' )]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"href|@import|url\(|fetch\(|XMLHttpRequest|eval\(|innerHTML", text)


def test_what_is_too_narrow_is_counted() -> None:
    many = profile(Sample((MAIN, STEP), 10**9, 1), *(Sample((MAIN, py(f"f{n}")), 10**4, 1) for n in range(50)))
    text = svg.write_svg(many)
    assert "50 branches narrower than 0.01% are not drawn (0.05% of the time)" in text
    assert "f7" not in text
    assert "not drawn" not in svg.write_svg(SIMPLE)
    assert boxes(svg.write_svg(profile())).keys() <= {"all"}


def test_deep_stacks() -> None:
    frames = tuple(py(f"f{n}") for n in range(320))
    assert len(boxes(svg.write_svg(profile(Sample(frames, MS, 1))))) == 321


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run the script with")
def test_zoom_and_search_do_what_they_say(tmp_path: Path) -> None:
    """The script of the file on a stand-in of the few DOM functions that it uses."""
    text = svg.write_svg(profile(*SIMPLE.samples, Sample((MAIN, STEP, py("zip", 9)), 1000 * MS, 100)))
    script = ElementTree.fromstring(text.encode()).find(".//s:script", NAMESPACE)
    assert script is not None
    drawn = [
        {**{name: frame.get(f"data-{name}") for name in "xwd"}, "title": frame.findtext("s:title", "", NAMESPACE)}
        for frame in boxes(text).values()
    ]
    stand_in = """
const data = %s;
function element() {
  return {attributes: {}, style: {}, classes: new Set(), textContent: "", listeners: {},
    setAttribute(n, v) { this.attributes[n] = v; }, addEventListener(n, f) { this.listeners[n] = f; },
    classList: {}};
}
const frames = data.map(d => {
  const g = element(), parts = {rect: element(), text: element(), title: {textContent: d.title}};
  g.dataset = d; g.querySelector = name => parts[name]; g.parts = parts;
  g.classList.toggle = (c, on) => on ? g.classes.add(c) : g.classes.delete(c);
  return g;
});
const named = {reset: element(), search: element(), found: element()};
globalThis.window = {prompt: () => "sgemm|load"};
globalThis.document = {documentElement: {dataset: {width: "1180", left: "10"}}, querySelectorAll: () => frames,
  getElementById: id => named[id], addEventListener() {}};
""" % json.dumps(drawn)  # noqa: UP031 - braces abound
    check = """
const by = name => frames.find(f => f.dataset.title.startsWith(name));
const label = f => f.dataset.title.split(/\\s/)[0];
const shown = f => f.style.display !== "none";
const out = {};
by("step").listeners.click();
const zip = by("zip").parts.rect.attributes, whole = by("step").parts.rect.attributes;
out.step = [whole.x, whole.width, zip.x, zip.width, shown(by("load"))];
by("forward").listeners.click();
out.zoomed = frames.filter(shown).map(f => [label(f), Math.round(f.parts.rect.attributes.width)]);
out.above = frames.filter(f => f.classes.has("above")).map(f => label(f));
named.search.listeners.click();
out.found = named.found.textContent;
out.matches = frames.filter(f => f.classes.has("match")).map(f => label(f));
window.argusFlame.search("sgemm|forward");
out.nested = named.found.textContent;
window.argusFlame.search("(");
out.wrong = named.found.textContent;
named.reset.listeners.click();
out.reset = frames.every(f => shown(f) && Math.abs(f.parts.rect.attributes.width - 1180 * f.dataset.w) < .01);
out.cleared = frames.some(f => f.classes.has("match"));
console.log(JSON.stringify(out));
"""
    file = tmp_path / "flame.js"
    file.write_text(stand_in + (script.text or "") + check)
    done = subprocess.run(["node", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(found["zoomed"]) == [
        ["all", 1180],
        ["forward", 1180],
        ["main", 1180],
        ["sgemm", 1180],
        ["step", 1180],
    ]
    assert sorted(found["above"]) == ["all", "main", "step"]
    # Of step's 1.91 s forward has 0.71 s, zip 1 s after it.
    assert found["step"] == [
        pytest.approx(10), pytest.approx(1180), pytest.approx(10 + 1180 * 710 / 1910, abs=0.01),
        pytest.approx(1180 * 1000 / 1910, abs=0.01), False,
    ]  # fmt: skip
    assert found["found"] == "found: 40.00 %"
    assert found["nested"] == "found: 35.50 %"
    assert sorted(found["matches"]) == ["load", "sgemm"]
    assert found["wrong"] == "not a regular expression"
    assert found["reset"]
    assert not found["cleared"]


# ---- differences

BEFORE = profile(
    Sample((MAIN, STEP, FORWARD), 800 * MS, 80), Sample((MAIN, LOAD), 200 * MS, 20), rank_steps=10, rank_ns=10**9
)
AFTER = profile(
    Sample((MAIN, STEP, FORWARD), 1600 * MS, 160),
    Sample((MAIN, STEP), 1000 * MS, 100),
    rank_steps=20,
    rank_ns=4 * 10**9,
)


def test_profiles_of_different_length_are_compared_per_step() -> None:
    two = difference(BEFORE, AFTER)
    assert two.unit == "per step and rank"
    assert two.before == {(MAIN, STEP, FORWARD): 80 * MS, (MAIN, LOAD): 20 * MS}
    assert two.after == {(MAIN, STEP, FORWARD): 80 * MS, (MAIN, STEP): 50 * MS}
    second = difference(BEFORE, AFTER, "second")
    assert second.after[MAIN, STEP, FORWARD] == 400 * MS
    part = difference(BEFORE, AFTER, "total")
    assert sum(part.before.values()) == pytest.approx(10**9)
    assert sum(part.after.values()) == pytest.approx(10**9)
    assert difference(profile(rank_steps=0), AFTER).unit == "per second and rank"


def test_who_gained_and_lost() -> None:
    found = {
        c.frame.function: (c.self_before, c.self_after, c.total_before, c.total_after)
        for c in changes(difference(BEFORE, AFTER))
    }
    assert found == {
        "step": (0, 50 * MS, 80 * MS, 130 * MS),
        "forward": (80 * MS, 80 * MS, 80 * MS, 80 * MS),
        "main": (0, 0, 100 * MS, 130 * MS),
        "load": (20 * MS, 0, 20 * MS, 0),
    }
    assert [c.frame.function for c in changes(difference(BEFORE, AFTER))] == ["step", "forward", "main", "load"]
    # Notes at the end of a stack are no code: the time is of the function above.
    waiting = profile(Sample((MAIN, LOAD, Frame("marker", "(waiting: read)")), MS, 1, "off"), rank_steps=1)
    assert changes(difference(profile(rank_steps=1), waiting))[0].frame == LOAD


def test_the_difference_as_a_graph() -> None:
    text = svg.write_difference(difference(BEFORE, AFTER), AFTER, "steps 0-9")
    drawn = boxes(text)
    assert "load (app/train.py:7)" not in drawn  # gone: it has no width, but it is in the table
    fills = {name: frame.find("s:rect", NAMESPACE).get("fill") or "" for name, frame in drawn.items()}  # type: ignore[union-attr]
    assert lean(fills["step (app/train.py:20)"]) > 20  # red: more
    assert lean(fills["forward (llama/model.py:30)"]) == 0  # grey: the same
    shown = [e.text for e in ElementTree.fromstring(text.encode()).iter() if e.tag.endswith("text")]
    assert "compared with: steps 0-9" in shown
    titles = "gained most (time in the frame itself)", "lost most (time in the frame itself)"
    for words in (*titles, "+50.0 ms", "-20.0 ms"):
        assert words in shown
    assert shown.index("step (app/train.py:20)", shown.index("gained most (time in the frame itself)")) > 0
    less = boxes(svg.write_difference(difference(AFTER, BEFORE), BEFORE, "later"))["main (app/train.py:1)"]
    assert lean(less.find("s:rect", NAMESPACE).get("fill") or "") < -10  # type: ignore[union-attr]
    assert boxes(svg.write_difference(difference(BEFORE, profile()), AFTER, "all")).keys() <= {"all"}


def lean(colour: str) -> int:
    """How much redder than blue a colour is."""
    return int(colour[1:3], 16) - int(colour[5:7], 16)


def test_the_difference_as_text() -> None:
    assert "".join(folded_difference(difference(BEFORE, AFTER))) == (
        "main (app/train.py:1);step (app/train.py:20);forward (llama/model.py:30) 80000000 80000000\n"
        "main (app/train.py:1);step (app/train.py:20) 0 50000000\n"
        "main (app/train.py:1);load (app/train.py:7) 20000000 0\n"
    )


def test_readable_durations() -> None:
    assert [duration(ns) for ns in (0, 999, 1500, 2.5e6, 1.25e9, 5.4321e12)] == [
        "0 ns", "999 ns", "1.50 µs", "2.50 ms", "1,250 ms", "5,432 s",
    ]  # fmt: skip


def test_a_thousand_ranks_in_one_file() -> None:
    stacks = [(MAIN, *(py(f"layer{k}", k) for k in range(n % 40)), native(f"k{n}")) for n in range(200)]
    large = profile(
        *(
            Sample(stacks[(rank + k) % 200], MS, 1, "cpu", rank, "python", rank + 1)
            for rank in range(1000)
            for k in range(5)
        )
    )
    assert len(json.loads(write_speedscope(large))["profiles"]) == 1000
    assert len(decoded(large).sample) == 5000
    assert len(list(write_folded(large))) == 200
    assert len(boxes(svg.write_svg(large))) > 200


def test_printable() -> None:
    assert printable("naïve🙂 f") == "naïve🙂 f"
    assert printable("a\nb\0") == "a\\nb\\x00"
    assert frame_text(Frame("python", "\udcff")) == "\\udcff"
