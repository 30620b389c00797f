"""What a page is made of: panels, and the views that they draw with.

A page is one JSON document (:class:`Page`) and the arrays that it refers to. Python decides what is shown and in which
words; the front end (``web/``) knows only the kinds of views below, and nothing of CUDA, NCCL or diagnosis. So a panel
is one file in ``panels/`` and one line in ``panels/order.py``, and needs no JavaScript.

Numbers of a view are in the unit that its ``unit`` names: ``ns``, ``bytes``, ``bytes_per_s``, ``ratio`` (1.84 is shown
as 1.84x), ``share`` (0.31 is shown as 31 %), ``count``. A number that is not known is null (in arrays of floats NaN, in
``u1`` arrays 255). Texts of others (names of jobs, hosts, kernels, functions, files) are bounded by
:func:`argus.model.text.shortened`, and are text to the front end, never markup. A title (of a bar, line, curve, track,
node) or detail (of a cell) that has "rank 12" at its start or behind a colon, comma or bracket, and no other rank,
stands for that rank: it is marked where the rank is selected, as are rows of tables with a column "rank".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

if TYPE_CHECKING:
    from argus.report.arrays import Arrays
    from argus.report.look import Look

PAGE_SCHEMA = "argus.page/1"

Unit = Literal["ns", "bytes", "bytes_per_s", "ratio", "share", "count", ""]


class ArrayRef(TypedDict):
    """An array beside the document: little-endian, C order, ``length`` bytes from ``offset`` of the unpacked bytes."""

    dtype: Literal["u1", "u2", "u4", "i4", "f4", "f8"]
    shape: list[int]
    offset: int
    length: int


class Sql(TypedDict):
    """A query that shows the panel's data again, runnable as it is by ``argus sql``."""

    title: str
    text: str


class Column(TypedDict):
    """A column of a table; ``unit`` decides how its numbers are printed."""

    title: str
    unit: Unit


class Table(TypedDict):
    """The text under a picture: its most important rows, at most 50, of ``of``."""

    columns: list[Column]
    rows: list[list[str | float | int | None]]
    of: int


class HeatRow(TypedDict):
    """A rank of a heat map. ``group`` is drawn as a block with a title (a pipeline stage, else a host); ``pinned`` rows
    (those that findings name) are drawn on top as well."""

    rank: int
    host: str
    gpu: str
    group: str
    pinned: bool


class Measure(TypedDict):
    """What the cells of a heat map may show.

    ``cells``: ``u1`` of shape (rows, columns), in which 0 to 254 stand for ``low`` to ``high`` on a linear scale; of
    the steps of a column the highest value. ``high_is_bad`` is False where low values are the fault.
    """

    key: str
    title: str
    unit: Unit
    low: float
    high: float
    high_is_bad: bool
    cells: ArrayRef


class Heatmap(TypedDict):
    """Ranks by steps. Column c has steps ``edges[c]`` to ``edges[c + 1] - 1``. ``full`` is False where several steps
    share a column; a live page then asks for them when it is zoomed in."""

    view: Literal["heatmap"]
    rows: list[HeatRow]
    edges: list[int]
    full: bool
    measures: list[Measure]
    marks: list[Mark]


class Mark(TypedDict):
    """Something at a step (of a series over something else: at its x): ``kind`` is ``change`` (a finding begins),
    ``more_work`` or ``note``."""

    step: int
    kind: Literal["change", "more_work", "note"]
    text: str


class Line(TypedDict):
    """A line of a series: ``y`` is ``f4``, as long as the series' ``x``. ``role``: ``typical`` (the median), ``high``
    and ``low`` (the edges of a band), ``named`` (a rank of a finding), ``baseline``."""

    title: str
    role: Literal["typical", "high", "low", "named", "baseline"]
    y: ArrayRef


class Series(TypedDict):
    """Lines over steps (``x_title`` "step"), runs ("run": the oldest is 1) or over something else that ascends."""

    view: Literal["series"]
    x_title: str
    x_unit: Unit
    x: ArrayRef
    y_title: str
    y_unit: Unit
    lines: list[Line]
    marks: list[Mark]


class StackedRow(TypedDict):
    """A bar: a rank that is named, the median, the 5th or 95th percentile. ``values`` in the order of ``parts``."""

    title: str
    named: bool
    values: list[float | None]


class Stacked(TypedDict):
    """Bars of parts that add up: the phases of a step, by rank."""

    view: Literal["stacked"]
    unit: Unit
    parts: list[str]
    rows: list[StackedRow]


class Bar(TypedDict):
    """``detail`` is shown on hover; ``named``: it belongs to a finding."""

    title: str
    value: float | None
    detail: str
    named: bool


class Bars(TypedDict):
    """Bars beside one another, most important first. ``origin``: where bars begin (1 for ratios of what-if). They span
    ``least`` at least: less is noise, and hardly has a bar."""

    view: Literal["bars"]
    unit: Unit
    origin: float
    least: float
    bars: list[Bar]


class Grid(TypedDict):
    """A small matrix: the mesh (stages by data-parallel ranks), who waits for whom. ``cells`` is ``f4`` of shape
    (rows, columns); ``details[row][column]`` is shown on hover. ``middle`` is the value that is neither good nor bad
    (1 for a slowdown), null: the scale begins at the lowest value. Colours span ``least`` at least: less is noise, and
    hardly has one."""

    view: Literal["grid"]
    row_title: str
    column_title: str
    rows: list[str]
    columns: list[str]
    unit: Unit
    middle: float | None
    least: float
    cells: ArrayRef
    details: list[list[str]]


class Curve(TypedDict):
    """A density: ``x`` and ``y`` are ``f4`` of the same length."""

    title: str
    named: bool
    x: ArrayRef
    y: ArrayRef


class Densities(TypedDict):
    """Distributions of one thing (a kernel's durations) on some ranks, drawn over one another."""

    view: Literal["densities"]
    title: str
    x_unit: Unit
    curves: list[Curve]


class Frame(TypedDict):
    """A frame of a flame graph. ``parent`` is an index into ``frames`` (-1: the root), which come before their
    children; ``self_ns`` is time in the frame itself. ``change_ns``: how much more than the peers (null: none)."""

    name: str
    parent: int
    total_ns: float
    self_ns: float
    change_ns: float | None
    language: Literal["python", "native", "kernel", ""]


class Flame(TypedDict):
    """A flame graph, root on top; with ``compared`` it is coloured by ``change_ns``."""

    view: Literal["flame"]
    title: str
    compared: str
    frames: list[Frame]


class Edge(TypedDict):
    """A link of a graph, from and to as indices of nodes."""

    source: int
    target: int
    value: float | None
    detail: str
    named: bool


class Graph(TypedDict):
    """Nodes in a circle with links: a ring of a communicator with the bandwidth of each link."""

    view: Literal["graph"]
    title: str
    unit: Unit
    nodes: list[str]
    edges: list[Edge]


class Track(TypedDict):
    """A row of a timeline: spans in ns from its origin, each [begin, end, name, named (0 or 1)]."""

    title: str
    spans: list[tuple[float, float, str, int]]


class Timeline(TypedDict):
    """Spans of one step: its critical path."""

    view: Literal["timeline"]
    title: str
    tracks: list[Track]


class Facts(TypedDict):
    """Names and texts, in order: coverage, node health, environment."""

    view: Literal["facts"]
    facts: list[Fact]


class Fact(TypedDict):
    """One of them."""

    name: str
    text: str
    state: Literal["good", "bad", "unknown", ""]


View = Heatmap | Series | Stacked | Bars | Grid | Densities | Flame | Graph | Timeline | Facts


class Panel(TypedDict):
    """A part of the page. Without data ``absent`` says why in one line, and the rest is empty."""

    id: str
    title: str
    lead: str
    absent: str
    views: list[View]
    table: Table | None
    sql: list[Sql]


class Window(TypedDict):
    """What of the run is shown: first and last step (null: the run has no steps), and wall times in ns as text, since
    JavaScript's numbers cannot hold them."""

    first_step: int | None
    last_step: int | None
    begin_ns: str
    end_ns: str


class Page(TypedDict):
    """The document. ``verdict`` is what ``argus diagnose --format json`` prints; ``made_ns``: wall time, as text;
    ``live``: the page comes from ``argus serve``, and may ask for more (``/api``)."""

    schema: str
    argus: str
    job: str
    run: int
    made_ns: str
    live: bool
    window: Window
    summary: str
    verdict: dict[str, Any]
    panels: list[Panel]


class PanelModule(Protocol):
    """A file in ``panels/``: reads what it shows, and makes it.

    Not a class: a module with these names. ``build`` raises nothing that a stored row could cause: a panel that fails
    is shown as absent, with the reason, and the others stay.
    """

    ID: str
    TITLE: str

    def build(self, look: Look, arrays: Arrays) -> Panel: ...
