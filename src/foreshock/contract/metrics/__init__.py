"""The metrics: their meaning, their reduction, and their names and texts wherever they are shown."""
