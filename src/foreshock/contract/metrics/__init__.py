"""The metrics: what each means, how it is reduced, and what it is called where it is shown."""
