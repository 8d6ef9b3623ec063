/** The panel of the heat map: choice of run, metric and head, and the button that switches the head. */

import { useEffect, useMemo, useState } from "preact/hooks";
import type { MetricInfo } from "./service";
import type { Ink } from "./colour";
import { NOT_RECORDED, number, percent } from "./format";
import { Frames } from "./frames";
import type { Head } from "./head";
import { HeatMap } from "./heatmap";
import { useResource, useSeen } from "./resource";
import { Name, Swatch } from "./parts";
import type { SwitchTarget } from "./switch";
import type { Loaded } from "./loaded";

interface Props {
  views: readonly Loaded[];
  catalog: readonly MetricInfo[];
  head: Head | null;
  onHead: (head: Head) => void;
  /** The metric in the address. */
  metric: string | null;
  onMetric: (metric: string) => void;
  /** null if the user may only read. */
  onSwitch: ((target: SwitchTarget) => void) | null;
  ink: Ink;
}

export function Heads({ views, catalog, head, onHead, metric: asked, onMetric, onSwitch, ink }: Props) {
  const metrics = catalog.filter((metric) => metric.per_head);
  const metric = metrics.find((candidate) => candidate.key === asked) ?? metrics[0];
  const key = metric?.key ?? "";
  const [shown, setShown] = useState(0);
  const [version, setVersion] = useState(0);
  const view = views[Math.min(shown, views.length - 1)]!;
  const { run } = view.detail;
  const [box, seen] = useSeen<HTMLDivElement>();
  const frames = useMemo(() => {
    const { layers } = view.detail;
    const heads = [...new Set(layers.flatMap(({ heads }) => heads))].sort((a, b) => a - b);
    return new Frames(run, key, layers.map(({ layer }) => layer), heads, () => setVersion((old) => old + 1));
  }, [run, key]);
  useEffect(() => () => frames.end(), [frames]);
  const loaded = useResource(() => frames.refresh().then(() => true), `${run} ${key}`, {
    on: (wake) => wake.run === null || wake.run === run,
    seen,
  });

  const warned = view.detail.warnings.flatMap(({ layer, head }) =>
    layer === null || head === null ? [] : [{ layer, head }],
  );
  const switched = view.detail.layers.flatMap(({ layer, heads, modes }) =>
    heads.filter((_, i) => modes[i] !== null && modes[i] !== "plain").map((head) => ({ layer, head })),
  );
  if (!metric) return null;
  const blank = frames.low > frames.high; // the heat map keeps its room, so that nothing below it moves
  return (
    <section aria-label="Layer by head">
      <header class="title">
        <h2>Layer by head</h2>
        {views.length > 1 && (
          <div class="segments" role="group" aria-label="Run">
            {views.map(({ detail, colour }, i) => (
              <button key={detail.run} aria-pressed={i === shown} onClick={() => setShown(i)}>
                <Swatch colour={colour} />
                <Name of={detail.run} />
              </button>
            ))}
          </div>
        )}
        <label class="pick">
          <span class="label">Measure</span>
          <select value={key} onChange={(event) => onMetric(event.currentTarget.value)}>
            {metrics.map((choice) => (
              <option key={choice.key} value={choice.key}>
                {choice.title}
              </option>
            ))}
          </select>
        </label>
      </header>
      <div class="card pad" ref={box}>
        <p class="muted">{metric.help}</p>
        <div class={blank ? "stack blank" : "stack"}>
          <HeatMap
            title={metric.title}
            frames={frames}
            version={version}
            signed={metric.signed}
            axis={metric.scale}
            chosen={head}
            warned={warned}
            switched={switched}
            ink={ink}
            format={metric.percent ? percent : number}
            onChoose={onHead}
          />
          {blank && <p class="empty">{loaded.error?.message ?? (loaded.data ? NOT_RECORDED : "Loading the values.")}</p>}
        </div>
        <footer class="keyed">
          <p class="key muted">
            <i class="box" style={{ borderColor: ink.warning }} /> warned
            <span class="diamond" style={{ color: ink.switched }}>
              ◆
            </span>{" "}
            switched
            <i class="box" style={{ borderColor: ink.outline }} /> plotted above
          </p>
          {head && onSwitch && view.detail.status === "active" && (
            <button onClick={() => onSwitch({ run, head, mode: view.detail.mitigation })}>
              Switch layer {head.layer} head {head.head}
            </button>
          )}
        </footer>
      </div>
    </section>
  );
}
