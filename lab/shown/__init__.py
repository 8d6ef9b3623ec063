"""The recorded runs that `foreshock demo` plays, made by scripts/demo_recordings.py, and what is said of them."""
