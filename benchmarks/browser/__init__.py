"""What the live page takes in a browser: many runs, many heads, many hours."""
