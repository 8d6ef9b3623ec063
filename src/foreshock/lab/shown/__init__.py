"""The recorded runs that `foreshock demo` plays, made by scripts/demo_recordings.py, and the sentences about them."""
