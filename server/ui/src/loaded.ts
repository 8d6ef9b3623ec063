/** A run that the page has loaded, and what may be done with it. */

import type { RunDetail, RunEvent } from "./service";

export interface Loaded {
  detail: RunDetail;
  events: RunEvent[];
  colour: string;
}
