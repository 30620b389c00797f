// Where the page's data comes from: out of the file, or from `argus serve`.

import { Arrays, unpack } from "./arrays.ts";
import type { Heatmap, Page, Runs } from "./contract.ts";

/** The reason for the reader why there is nothing to show. */
export class Unavailable extends Error {}

export interface Loaded { page: Page; arrays: Arrays; version: string }

export interface Source {
  readonly live: boolean;
  page(job: string, run: number): Promise<Loaded>;
  runs(): Promise<Runs>;
  heatmap(job: string, run: number, measure: string, first: number, last: number): Promise<{ heatmap: Heatmap; arrays: Arrays }>;
  /** Calls back when a run has more than the page of a version, until the signal. `connected`: whether it is followed. */
  follow(job: string, run: number, version: () => string, changed: () => void, connected: (is: boolean, why: string) => void, signal: AbortSignal): void;
}

/** The document and arrays inside the file. */
export class Embedded implements Source {
  readonly live = false;

  async page(): Promise<Loaded> {
    const text = document.getElementById("argus-page")?.textContent;
    const packed = document.getElementById("argus-arrays")?.textContent;
    let page: Page;
    try {
      page = JSON.parse(text ?? "") as Page;
    } catch {
      throw new Unavailable("This file is cut off or damaged: its data cannot be read. Make it anew with argus report.");
    }
    checkPage(page);
    // The last element of the file: without its end, the file's is missing.
    const arrays = packed === undefined ? new Arrays(new Uint8Array(0), "the file is cut off") : await unpack(packed);
    return { page, arrays, version: "" };
  }

  async runs(): Promise<Runs> {
    return { runs: [], left_out: 0 };
  }

  async heatmap(): Promise<never> {
    throw new Unavailable("A file has no finer steps.");
  }

  follow(): void {}
}

function checkPage(page: Page): void {
  if (typeof page?.schema !== "string" || !page.schema.startsWith("argus.page/"))
    throw new Unavailable("This is no page of Argus.");
  if (page.schema !== "argus.page/1")
    throw new Unavailable(`This page is of another version of Argus (${page.schema.slice(0, 40)}).`);
}

const TOKEN = "argus-token";

/** Answers of the server this page came from. */
export class Served implements Source {
  readonly live = true;

  /** `token`: out of the address, once; kept for this tab. */
  constructor(private token: string | null) {
    try {
      if (token !== null) sessionStorage.setItem(TOKEN, token);
      else this.token = sessionStorage.getItem(TOKEN);
    } catch {
      // A browser that keeps nothing: the token lasts as long as this page.
    }
  }

  private async ask(path: string, values: Record<string, string | number>, signal?: AbortSignal, accept = "application/json"): Promise<Response> {
    const query = new URLSearchParams(Object.entries(values).map(([name, value]) => [name, String(value)])).toString();
    const headers: Record<string, string> = { Accept: accept };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    let answer: Response;
    try {
      answer = await fetch(`/api/${path}${query ? `?${query}` : ""}`, { headers, signal, cache: "no-store" });
    } catch (failure) {
      if (signal?.aborted) throw failure;
      throw new Unavailable("The server does not answer. Is argus serve still running?");
    }
    if (answer.status === 401 || answer.status === 403)
      throw new Unavailable("The server wants its token: open the link that argus serve printed.");
    if (!answer.ok) {
      const text = (await answer.text()).slice(0, 2000);
      throw new Unavailable(`The server cannot show it (${answer.status}): ${reason(text)}`);
    }
    return answer;
  }

  private async json<T>(path: string, values: Record<string, string | number>): Promise<T> {
    const answer = await this.ask(path, values);
    try {
      return (await answer.json()) as T;
    } catch {
      throw new Unavailable("The server's answer is cut off.");
    }
  }

  async page(job: string, run: number): Promise<Loaded> {
    const { page, arrays, version } = await this.json<{ page: Page; arrays: string; version?: string }>("page", { job, run });
    checkPage(page);
    return { page, arrays: await unpack(arrays), version: version ?? "" };
  }

  async runs(): Promise<Runs> {
    return this.json<Runs>("runs", {});
  }

  async heatmap(job: string, run: number, measure: string, first: number, last: number): Promise<{ heatmap: Heatmap; arrays: Arrays }> {
    const answer = await this.json<{ heatmap: Heatmap; arrays: string }>("heatmap", { job, run, measure, first, last });
    return { heatmap: answer.heatmap, arrays: await unpack(answer.arrays) };
  }

  follow(job: string, run: number, version: () => string, changed: () => void, connected: (is: boolean, why: string) => void, signal: AbortSignal): void {
    void this.listen(job, run, version, changed, connected, signal);
  }

  private async listen(job: string, run: number, version: () => string, changed: () => void, connected: (is: boolean, why: string) => void, signal: AbortSignal): Promise<void> {
    let pause = 1000;
    while (!signal.aborted) {
      try {
        // Not EventSource: it sends no headers.
        const answer = await this.ask("events", { job, run, version: version() }, signal, "text/event-stream");
        connected(true, "");
        for await (const { event, data } of eventsOf(answer.body!)) {
          // Trouble: the store does not answer, the run is gone, or too many watch.
          connected(event !== "trouble", data.replace(/^! /, ""));
          if (event !== "trouble") pause = 1000;
          if (event === "changed") changed();
        }
      } catch {
        if (signal.aborted) return;
      }
      connected(false, "");
      await new Promise((resume) => setTimeout(resume, pause));
      pause = Math.min(30_000, pause * 2);
    }
  }
}

/** What an answer says of why there is none. */
function reason(text: string): string {
  try {
    const { error, hint } = JSON.parse(text) as { error?: unknown; hint?: unknown };
    return [error, hint].filter((part) => typeof part === "string" && part).join(". ").slice(0, 600);
  } catch {
    return text.slice(0, 300);
  }
}

/** The names of server-sent events, as they come. */
export async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<{ event: string; data: string }> {
  const reader = body.getReader(), decoder = new TextDecoder();
  let rest = "", name = "", data = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop()!.slice(-65536);
      for (const line of lines) {
        if (line === "") {
          if (name) yield { event: name, data };
          name = data = "";
        } else if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line.startsWith("data:")) data = line.slice(5).trim().slice(0, 400);
      }
    }
  } finally {
    reader.releaseLock();
  }
}
