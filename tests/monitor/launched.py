"""A launched process: `python -P launched.py FOLDER` saves its run, rank and world size to FOLDER/RANK.pt."""

import os
import sys
from pathlib import Path

import torch

from foreshock.monitor.config import make_config

config = make_config(None, {})
torch.save((config.run, config.rank, config.world_size), Path(sys.argv[1]) / f"{os.environ['RANK']}.pt")
