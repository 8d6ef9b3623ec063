/** Warnings in words, with their evidence and forecast. */

import type { ActiveWarning } from "./api";
import { number, roundTo2, steps, words } from "./format";
import type { Head } from "./heatmap";
import { Swatch } from "./parts";
import type { SwitchTarget } from "./switch";
import type { Loaded } from "./view";

interface Props {
  views: readonly Loaded[];
  compare: boolean;
  onShow: (head: Head) => void;
  onSwitch: (target: SwitchTarget) => void;
}

export function Warnings({ views, compare, onShow, onSwitch }: Props) {
  const all = views.flatMap((view) => view.detail.warnings.map((warning) => ({ view, warning })));
  all.sort((a, b) => URGENCY.indexOf(a.warning.severity) - URGENCY.indexOf(b.warning.severity));
  const list = (some: typeof all, open: boolean) => (
    <ul class="warnings">
      {some.map(({ view, warning }, i) => (
        <Warning
          key={`${view.detail.run} ${warning.rank} ${warning.id}`}
          warning={warning}
          view={view}
          compare={compare}
          open={open && i === 0}
          onShow={onShow}
          onSwitch={onSwitch}
        />
      ))}
    </ul>
  );
  return (
    <section aria-label="Warnings" aria-live="polite">
      {all.length === 0 && <p class="note calm">No active warning.</p>}
      {list(all.slice(0, SHOWN), !compare)}
      {all.length > SHOWN && (
        <details class="more">
          <summary>{all.length - SHOWN} more warnings</summary>
          {list(all.slice(SHOWN), false)}
        </details>
      )}
    </section>
  );
}

const URGENCY = ["critical", "warning", "info"];
/** The rest is folded away: when many heads fail at once, the charts must not leave the screen. */
const SHOWN = 3;

interface WarningProps extends Omit<Props, "views"> {
  /** Whether its numbers are shown: side by side the charts speak, and below the first warning too. */
  open: boolean;
  warning: ActiveWarning;
  view: Loaded;
}

function Warning({ warning, view, compare, open, onShow, onSwitch }: WarningProps) {
  const { layer, head } = warning;
  const state = view.detail.layers.find((candidate) => candidate.layer === layer);
  const mode = (head !== null && state?.modes[state.heads.indexOf(head)]) || "plain";
  return (
    <li class={`card warning ${warning.severity}`}>
      <header>
        <span class="severity">{warning.severity}</span>
        {compare && (
          <span class="run">
            <Swatch colour={view.colour} />
            {view.detail.run}
          </span>
        )}
        <span class="muted">
          {layer === null ? "whole run" : `layer ${layer}${head === null ? "" : ` head ${head}`}`} · {warning.cause} ·
          raised at step {steps(warning.raised_step)}
        </span>
        {mode !== "plain" && <span class="switched">◆ now {words(mode)}</span>}
      </header>
      <p class="sentence">{warning.sentence}</p>
      <p class="left">
        <span class="muted">Steps left until the largest |score| is 512:</span> <b>{forecast(warning)}</b>
      </p>
      <details open={open}>
        <summary>Evidence</summary>
        <dl class="evidence">
          {Object.entries(warning.evidence).map(([name, value]) => (
            <div key={name}>
              <dt title={words(name)}>{words(name)}</dt>
              <dd>{number(value)}</dd>
            </div>
          ))}
        </dl>
      </details>
      {layer !== null && head !== null && (
        <footer>
          <button onClick={() => onShow({ layer, head })}>Show this head</button>
          {view.detail.status === "active" && (
            <button
              class={mode === "plain" ? "primary" : ""}
              onClick={() =>
                onSwitch({
                  run: view.detail.run,
                  head: { layer, head },
                  mode: mode === "plain" ? view.detail.mitigation : "plain",
                })
              }
            >
              {mode === "plain" ? "Switch this head" : "Switch back"}
            </button>
          )}
        </footer>
      )}
    </li>
  );
}

function forecast({
  forecast_steps: middle,
  forecast_low_steps: low,
  forecast_high_steps: high,
}: ActiveWarning): string {
  if (middle === null) return "no forecast";
  if (middle < 1) return "none, it is past that";
  const range = low !== null && high !== null ? ` (${steps(roundTo2(low))} to ${steps(roundTo2(high))})` : "";
  return `about ${steps(roundTo2(middle))}${range}`;
}
