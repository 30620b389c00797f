// Colours: cividis for heat maps, blue to orange around a middle, and what the style sheet says.

export type Rgb = [number, number, number];

const CIVIDIS = ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "e1cc55", "fee838"];

function rgb(hex: string): Rgb {
  return [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)) as Rgb;
}

function between(stops: Rgb[], t: number): Rgb {
  const at = Math.min(1, Math.max(0, t)) * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  return stops[i].map((value, k) => Math.round(value + (stops[i + 1][k] - value) * (at - i))) as Rgb;
}

const STOPS = CIVIDIS.map(rgb);

/** Cividis, 0 dark blue to 1 yellow: the same order for every kind of colour vision, and in grey. */
export function cividis(t: number): Rgb {
  return between(STOPS, t);
}

/** Colours of 0 to 254 and of unknown (255) as words of ImageData (little-endian). Bright is always the fault. */
export function lookUp(highIsBad: boolean, unknown: Rgb): Uint32Array {
  const table = new Uint32Array(256);
  for (let i = 0; i < 255; i++) table[i] = word(cividis(highIsBad ? i / 254 : 1 - i / 254));
  table[255] = word(unknown);
  return table;
}

export function word([r, g, b]: Rgb): number {
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

export function css([r, g, b]: Rgb): string {
  return `rgb(${r}, ${g}, ${b})`;
}

/** Blue (-1) over neutral (0) to orange (1). */
export function diverging(t: number, dark: boolean): Rgb {
  const stops = dark
    ? [rgb("6db6ff"), rgb("2b4d6e"), rgb("3a3f47"), rgb("80501d"), rgb("ffa040")]
    : [rgb("1f5fa8"), rgb("92bce0"), rgb("eceff1"), rgb("f2b56b"), rgb("c25700")];
  return between(stops, (t + 1) / 2);
}

const OF_PART: Record<string, number> = {
  "forward": 0, "backward": 1, "optimizer": 2, "all reduce": 3, "all gather": 4, "reduce scatter": 5,
  "pipeline bubble": 6, "data loading": 7, "idle": 8, "send recv": 9,
};

/** Places of parts among so many colours: a phase has the same one on every page, others one that is left. */
export function placesOf(parts: string[], colors: number): number[] {
  const taken = new Set(parts.map((part) => OF_PART[part]));
  const left = Array.from({ length: colors }, (_, i) => i).filter((i) => !taken.has(i));
  let next = 0;
  return parts.map((part, i) => OF_PART[part] ?? (left.length ? left[next++ % left.length] : i % colors));
}

/** Black or white, whichever is readable on a colour. */
export function inkOn([r, g, b]: Rgb): string {
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#111" : "#fff";
}

export interface Theme {
  dark: boolean; text: string; muted: string; line: string; surface: string; named: string; accent: string;
  unknown: Rgb; parts: string[];
}

let current: Theme | null = null;

/** What the style sheet says now. */
export function theme(): Theme {
  if (current) return current;
  const style = getComputedStyle(document.documentElement);
  const value = (name: string) => style.getPropertyValue(name).trim();
  current = {
    dark: value("--dark") === "1",
    text: value("--text"), muted: value("--muted"), line: value("--line"), surface: value("--surface"),
    named: value("--named"), accent: value("--accent"),
    unknown: rgb(value("--unknown").slice(1)),
    parts: Array.from({ length: 10 }, (_, i) => value(`--part-${i}`)),
  };
  return current;
}

export function themeChanged(): void {
  current = null;
}
