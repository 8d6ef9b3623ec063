/** Display name, tags and notes of a run, and its deletion. */

import { useState } from "preact/hooks";
import { api } from "./api";
import { Dialog, Field, FormEnd, useSending, useWho } from "./dialog";
import { steps } from "./format";
import { Name } from "./parts";
import type { RunDetail } from "./service";

export interface May {
  /** switch heads, and change display name, tags and notes */
  act: boolean;
  /** delete runs */
  delete: boolean;
}

/** A run's display name, with its unique name below. */
export function Identity({ detail }: { detail: RunDetail }) {
  if (!detail.display_name || detail.display_name === detail.run) return <h1>{detail.run}</h1>;
  return (
    <div class="identity">
      <h1>
        <bdi>{detail.display_name}</bdi>
      </h1>
      <span class="muted">
        <Name of={detail.run} most={90} />
      </span>
    </div>
  );
}

export function Tags({ tags }: { tags: readonly string[] }) {
  if (!tags.length) return null;
  return (
    <ul class="tags" aria-label="Tags">
      {tags.map((tag) => (
        <li key={tag}>
          <bdi>{tag}</bdi>
        </li>
      ))}
    </ul>
  );
}

/** Long notes are collapsed, so that the charts stay on the screen. */
export function Notes({ notes }: { notes: string }) {
  if (!notes) return null;
  const brief = notes.length <= 160 && !notes.includes("\n");
  if (brief) return <p class="notes">{notes}</p>;
  return (
    <details class="notes">
      <summary>{notes.split("\n")[0]!.slice(0, 120)} …</summary>
      <p>{notes}</p>
    </details>
  );
}

interface Props {
  detail: RunDetail;
  may: May;
  /** Called after the run was deleted. */
  gone: () => void;
}

/** Buttons for actions on the whole run. */
export function Care({ detail, may, gone }: Props) {
  const [open, setOpen] = useState<"describe" | "delete" | null>(null);
  const trains = ["active", "hung"].includes(detail.condition);
  const close = () => setOpen(null);
  if (!may.act && !(may.delete && !trains)) return null;
  return (
    <span class="buttons">
      {may.act && (
        <button class="quiet" onClick={() => setOpen("describe")}>
          Name and notes
        </button>
      )}
      {may.delete && !trains && (
        <button class="quiet" onClick={() => setOpen("delete")}>
          Delete
        </button>
      )}
      {open === "describe" && <Describe detail={detail} close={close} />}
      {open === "delete" && <Delete detail={detail} close={close} gone={gone} />}
    </span>
  );
}

function Describe({ detail, close }: { detail: RunDetail; close: () => void }) {
  const [who, setWho, keep] = useWho();
  const [name, setName] = useState(detail.display_name ?? "");
  const [tags, setTags] = useState(detail.tags.join(", "));
  const [notes, setNotes] = useState(detail.notes);
  const [state, send] = useSending();
  const submit = (event: Event) => {
    event.preventDefault();
    keep();
    const named = tags.split(",").map((tag) => tag.trim()).filter(Boolean);
    void send(async () => {
      await api.describe(detail.run, { who, display_name: name.trim(), tags: named, notes: notes.trim() });
      close();
    });
  };
  return (
    <Dialog title="Name and notes" close={close}>
      <form onSubmit={submit}>
        <p class="muted">
          Agents, alerts and addresses still use the name <code>{detail.run}</code>.
        </p>
        <Field label="Display name" name="display_name" value={name} set={setName} most={128} />
        <Field label="Tags" name="tags" value={tags} set={setTags} most={2000} hint="baseline, keep" />
        <label class="field">
          <span>Notes</span>
          <textarea name="notes" rows={5} maxLength={4000} value={notes} onInput={(event) => setNotes(event.currentTarget.value)} />
        </label>
        <Field label="Your name" name="who" value={who} set={setWho} most={128} required />
        <FormEnd state={state} verb="Save" close={close} />
      </form>
    </Dialog>
  );
}

function Delete({ detail, close, gone }: { detail: RunDetail; close: () => void; gone: () => void }) {
  const [who, setWho, keep] = useWho();
  const [reason, setReason] = useState("");
  const [confirming, setConfirming] = useState(false);
  const [state, send] = useSending();
  const submit = (event: Event) => {
    event.preventDefault();
    if (!confirming) return setConfirming(true);
    keep();
    void send(async () => {
      await api.remove(detail.run, { who, reason });
      gone();
    });
  };
  return (
    <Dialog title="Delete a run" close={close}>
      <form onSubmit={submit}>
        {confirming ? (
          <div class="confirm">
            <p class="sentence">
              Delete {detail.run} with its {steps(detail.last_step ?? 0)} steps, its warnings and its orders. This cannot be
              undone.
            </p>
            <p class="muted">
              {who}: {reason}
            </p>
          </div>
        ) : (
          <>
            <p class="sentence">Delete {detail.run} and all its data.</p>
            <Field label="Your name" name="who" value={who} set={setWho} most={128} required />
            <Field label="Reason" name="reason" value={reason} set={setReason} most={500} required />
          </>
        )}
        <FormEnd
          state={state}
          verb={confirming ? "Delete now" : "Continue"}
          close={close}
          back={confirming ? () => setConfirming(false) : null}
        />
      </form>
    </Dialog>
  );
}
