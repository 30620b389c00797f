// What is looked at: rank, steps, measure. It is in the address, and all views follow it.

export interface Looking { rank: number | null; steps: [number, number] | null; measure: string | null }
type Listener = (changed: keyof Looking) => void;

/** One for the page. Steps are first and last, both shown. */
export class State {
  rank: number | null = null;
  steps: [number, number] | null = null;
  measure: string | null = null;
  /** Rows of the heat map that it is zoomed to, first and end; not in the address. */
  rows: [number, number] | null = null;
  private readonly listeners = new Map<Listener, AbortSignal>();

  /** Calls back after each change, until the signal. */
  follow(listener: Listener, signal: AbortSignal): void {
    this.listeners.set(listener, signal);
    signal.addEventListener("abort", () => this.listeners.delete(listener));
  }

  selectRank(rank: number | null): void {
    const next = rank === this.rank ? null : rank;
    if (next === this.rank) return;
    this.rank = next;
    this.changed("rank");
  }

  showSteps(steps: [number, number] | null): void {
    if (steps?.[0] === this.steps?.[0] && steps?.[1] === this.steps?.[1]) return;
    this.steps = steps;
    this.changed("steps");
  }

  showMeasure(key: string): void {
    if (key === this.measure) return;
    this.measure = key;
    this.changed("measure");
  }

  private changed(what: keyof Looking): void {
    for (const listener of [...this.listeners.keys()]) listener(what);
  }
}

/** Of the part of an address behind `#`. What is not understood is left out. */
export function fromAddress(hash: string): Looking & { job: string | null; run: number | null; token: string | null } {
  const values = new URLSearchParams(hash.replace(/^#/, ""));
  const whole = (text: string | null) => (text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null);
  const range = /^(\d{1,15})-(\d{1,15})$/.exec(values.get("steps") ?? "");
  const steps: [number, number] | null = range && +range[1] <= +range[2] ? [+range[1], +range[2]] : null;
  return {
    job: values.get("job"), run: whole(values.get("run")), token: values.get("token"),
    rank: whole(values.get("rank")), steps, measure: values.get("measure"),
  };
}

export function toAddress(looking: Looking, job: string | null, run: number | null): string {
  const values = new URLSearchParams();
  if (job !== null) values.set("job", job);
  if (run !== null) values.set("run", String(run));
  if (looking.measure) values.set("measure", looking.measure);
  if (looking.steps) values.set("steps", looking.steps.join("-"));
  if (looking.rank !== null) values.set("rank", String(looking.rank));
  const text = values.toString();
  return text ? `#${text}` : "";
}
