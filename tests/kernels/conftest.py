"""The Triton suite needs a GPU or Triton's interpreter, which must be chosen before Triton is first imported.

Without either, its files are left to test_interpreter.py, which runs them in a process of their own.
"""

import os

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_triton_*.py"]
