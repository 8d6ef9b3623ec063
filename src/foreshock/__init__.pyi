from typing import Final

from foreshock import callbacks as callbacks
from foreshock import client as client
from foreshock.monitor import Agent as Agent
from foreshock.monitor import AgentConfig as AgentConfig
from foreshock.monitor import Assessment as Assessment
from foreshock.monitor import assess as assess
from foreshock.monitor import attach as attach
from foreshock.monitor import detach as detach

__version__: Final[str]
