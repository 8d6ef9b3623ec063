"""What people watch today, as detectors over a recorded run, to be scored beside ours.

The three that need weights or activations read what `foreshock.lab.probe.ModelProbe` left in the trace; the others read
the loss and gradient norm of every step, or the samples.
"""
