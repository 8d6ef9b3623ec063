/** A run that the page has loaded. */

import type { CommandStatus, Incident, RunDetail, RunEvent } from "./service";

export interface Loaded {
  detail: RunDetail;
  /** Most urgent first. */
  incidents: Incident[];
  events: RunEvent[];
  commands: CommandStatus[];
  colour: string;
}
