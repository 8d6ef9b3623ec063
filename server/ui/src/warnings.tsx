/** Warnings in words, with their evidence and forecast. */

import type { ActiveWarning } from "./service";
import { number, PAST, roundTo2, steps, words } from "./format";
import type { Head } from "./head";
import { Name, Swatch } from "./parts";
import type { SwitchTarget } from "./switch";
import type { Loaded } from "./loaded";

interface Props {
  views: readonly Loaded[];
  compare: boolean;
  onShow: (head: Head) => void;
  /** null for those who may only read. */
  onSwitch: ((target: SwitchTarget) => void) | null;
}

interface Item {
  view: Loaded;
  warning: ActiveWarning;
}

const URGENCY = ["critical", "warning", "info"];

/** The most urgent warning in full, the others as rows that are folded away: the charts must stay on the screen. */
export function Warnings({ views, compare, onShow, onSwitch }: Props) {
  const all = views.flatMap((view) => view.detail.warnings.map((warning): Item => ({ view, warning })));
  all.sort((a, b) => urgency(a) - urgency(b) || left(a) - left(b));
  const [first, ...others] = all;
  const runs = { compare, onShow, onSwitch };
  return (
    <section aria-label="Warnings" aria-live="polite">
      {!first && <p class="note calm">No active warning.</p>}
      {first && <Warning key={`${first.view.detail.run} ${first.warning.id}`} {...first} {...runs} open={!compare} />}
      {others.length > 0 && (
        <details class="more">
          <summary>
            {others.length} more {others.length > 1 ? "warnings" : "warning"}
          </summary>
          <div class="card table scroll">
            <table class="folds">
              <thead>
                <tr>
                  {compare && <th>Run</th>}
                  <th>Where</th>
                  <th>Severity</th>
                  <th>Cause</th>
                  <th class="right">Raised at step</th>
                  <th>Steps left</th>
                  <th />
                </tr>
              </thead>
              <tbody>
                {others.map((item) => (
                  <Row key={`${item.view.detail.run} ${item.warning.rank} ${item.warning.id}`} {...item} {...runs} />
                ))}
              </tbody>
            </table>
          </div>
        </details>
      )}
    </section>
  );
}

const urgency = ({ warning }: Item) => URGENCY.indexOf(warning.severity);
const left = ({ warning }: Item) => warning.forecast_steps ?? Infinity;

type ItemProps = Item & Omit<Props, "views">;

/** A warning in one line; its sentence under the pointer. */
function Row({ view, warning, compare, onShow, onSwitch }: ItemProps) {
  return (
    <tr title={warning.sentence}>
      {compare && (
        <td class="name">
          <Swatch colour={view.colour} />
          <Name of={view.detail.run} />
        </td>
      )}
      <td data-label="Where" class="name">
        {where(warning)}
      </td>
      <td data-label="Severity">
        <span class="severity" data-level={warning.severity}>
          {warning.severity}
        </span>
      </td>
      <td data-label="Cause">{warning.cause}</td>
      <td data-label="Raised at step" class="right">
        {steps(warning.raised_step)}
      </td>
      <td data-label="Steps left">{forecast(warning)}</td>
      <td>
        <Buttons {...{ view, warning, onShow, onSwitch }} />
      </td>
    </tr>
  );
}

function where({ layer, head }: ActiveWarning): string {
  return layer === null ? "whole run" : `layer ${layer}${head === null ? "" : ` head ${head}`}`;
}

function modeOf(view: Loaded, { layer, head }: ActiveWarning): string {
  const state = view.detail.layers.find((candidate) => candidate.layer === layer);
  return (head !== null && state?.modes[state.heads.indexOf(head)]) || "plain";
}

/** `open` says whether its numbers are shown; side by side the charts speak. */
function Warning({ warning, view, compare, open, onShow, onSwitch }: ItemProps & { open: boolean }) {
  const mode = modeOf(view, warning);
  return (
    <article class={`card warning warnings ${warning.severity}`}>
      <header>
        <span class="severity" data-level={warning.severity}>
          {warning.severity}
        </span>
        {compare && (
          <span class="run">
            <Swatch colour={view.colour} />
            <Name of={view.detail.run} />
          </span>
        )}
        <span class="muted">
          {where(warning)} · {warning.cause} · raised at step {steps(warning.raised_step)}
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
      <footer>
        <Buttons {...{ view, warning, onShow, onSwitch }} />
      </footer>
    </article>
  );
}

function Buttons({ view, warning, onShow, onSwitch }: Omit<ItemProps, "compare">) {
  const { layer, head } = warning;
  if (layer === null || head === null) return null;
  const mode = modeOf(view, warning);
  const target = { run: view.detail.run, head: { layer, head } };
  return (
    <span class="buttons">
      <button onClick={() => onShow({ layer, head })}>Show this head</button>
      {onSwitch && view.detail.status === "active" && (
        <button
          class={mode === "plain" ? "primary" : ""}
          onClick={() => onSwitch({ ...target, mode: mode === "plain" ? view.detail.mitigation : "plain" })}
        >
          {mode === "plain" ? "Switch this head" : "Switch back"}
        </button>
      )}
    </span>
  );
}

function forecast({
  forecast_steps: middle,
  forecast_low_steps: low,
  forecast_high_steps: high,
}: ActiveWarning): string {
  if (middle === null) return "no forecast";
  if (middle < 1) return PAST;
  const range = low !== null && high !== null ? ` (${steps(roundTo2(low))} to ${steps(roundTo2(high))})` : "";
  return `about ${steps(roundTo2(middle))}${range}`;
}
