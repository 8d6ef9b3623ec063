/** A run that the page has loaded, and what may be done with it. */

import type { CommandStatus, Incident, RunDetail, RunEvent } from "./service";

export interface Loaded {
  detail: RunDetail;
  /** The most urgent first. */
  incidents: Incident[];
  events: RunEvent[];
  commands: CommandStatus[];
  colour: string;
}
