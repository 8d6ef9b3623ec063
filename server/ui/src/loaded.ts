/** A run that the page has loaded, and what may be done with it. */

import type { Incident, RunDetail, RunEvent } from "./service";

export interface Loaded {
  detail: RunDetail;
  /** All warnings of one cause each, the most urgent first. */
  incidents: Incident[];
  events: RunEvent[];
  colour: string;
}
