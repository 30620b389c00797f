// What Python sends: the same fields as in argus/report/panel.py, which explains them. A test compares the two.

export type Unit = "ns" | "bytes" | "bytes_per_s" | "ratio" | "share" | "count" | "";
export type Dtype = "u1" | "u2" | "u4" | "i4" | "f4" | "f8";

export interface ArrayRef { dtype: Dtype; shape: number[]; offset: number; length: number }
export interface Sql { title: string; text: string }
export interface Column { title: string; unit: Unit }
export interface Table { columns: Column[]; rows: (string | number | null)[][]; of: number }
export interface HeatRow { rank: number; host: string; gpu: string; group: string; pinned: boolean }
export interface Measure {
  key: string; title: string; unit: Unit; low: number; high: number; high_is_bad: boolean; cells: ArrayRef;
}
export interface Heatmap {
  view: "heatmap"; rows: HeatRow[]; edges: number[]; full: boolean; measures: Measure[]; marks: Mark[];
}
export interface Mark { step: number; kind: "change" | "more_work" | "note"; text: string }
export interface Line { title: string; role: "typical" | "high" | "low" | "named" | "baseline"; y: ArrayRef }
export interface Series {
  view: "series"; x_title: string; x_unit: Unit; x: ArrayRef; y_title: string; y_unit: Unit; lines: Line[];
  marks: Mark[];
}
export interface StackedRow { title: string; named: boolean; values: (number | null)[] }
export interface Stacked { view: "stacked"; unit: Unit; parts: string[]; rows: StackedRow[] }
export interface Bar { title: string; value: number | null; detail: string; named: boolean }
export interface Bars { view: "bars"; unit: Unit; origin: number; least: number; bars: Bar[] }
export interface Grid {
  view: "grid"; row_title: string; column_title: string; rows: string[]; columns: string[]; unit: Unit;
  middle: number | null; least: number; cells: ArrayRef; details: string[][];
}
export interface Curve { title: string; named: boolean; x: ArrayRef; y: ArrayRef }
export interface Densities { view: "densities"; title: string; x_unit: Unit; curves: Curve[] }
export interface Frame {
  name: string; parent: number; total_ns: number; self_ns: number; change_ns: number | null;
  language: "python" | "native" | "kernel" | "";
}
export interface Flame { view: "flame"; title: string; compared: string; frames: Frame[] }
export interface Edge { source: number; target: number; value: number | null; detail: string; named: boolean }
export interface Graph { view: "graph"; title: string; unit: Unit; nodes: string[]; edges: Edge[] }
export interface Track { title: string; spans: [number, number, string, number][] }
export interface Timeline { view: "timeline"; title: string; tracks: Track[] }
export interface Fact { name: string; text: string; state: "good" | "bad" | "unknown" | "" }
export interface Facts { view: "facts"; facts: Fact[] }
export type View =
  | Heatmap | Series | Stacked | Bars | Grid | Densities | Flame | Graph | Timeline | Facts;
export interface Panel {
  id: string; title: string; lead: string; absent: string; views: View[]; table: Table | null; sql: Sql[];
}
export interface Window { first_step: number | null; last_step: number | null; begin_ns: string; end_ns: string }
export interface Page {
  schema: string; argus: string; job: string; run: number; made_ns: string; live: boolean; window: Window;
  summary: string; verdict: Verdict; panels: Panel[];
}

// Of argus/diagnose/verdict.schema.json, what the page shows.
export interface Evidence { text: string; sql: string }
export interface Finding {
  kind: string; ranks: number[]; hosts: string[]; steps: number[]; phase: string; kernels: string[];
  slowdown: number; share: number; confidence: number; level: string; id: string; owner: string;
  evidence: Evidence[]; action: string;
}
export interface Breakdown {
  ranks: number[]; steps: number[]; seconds: number; parts: { part: string; text: string; sql: string }[];
  advice: string[];
}
export interface Verdict {
  job?: string; ranks?: number; steps?: number[]; status?: string; slowdown?: number; reason?: string;
  findings?: Finding[]; breakdown?: Breakdown;
  coverage?: { complete: boolean; ended?: boolean; dropped: Record<string, number> };
}

// What /api answers.
export interface Run {
  job: string; run: number; began_ns: string; ended_ns: string | null; ranks: number; hosts: number;
  status: string; summary: string;
}
export interface Runs { runs: Run[]; left_out: number }
