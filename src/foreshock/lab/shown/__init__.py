"""The recorded runs that `foreshock demo` plays, which are parts of those in lab/traces, and their commentary."""
