"""The recorded runs that `foreshock demo` plays, parts of those in lab/traces, and the sentences about them."""
