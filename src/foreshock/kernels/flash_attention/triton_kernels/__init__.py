"""The passes of forward and backward in Triton, and what they share; whoever imports one of them imports Triton."""
