"""The passes of forward and backward in Triton, and their shared functions. Importing any of them imports Triton."""
