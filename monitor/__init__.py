"""The agent: watches the attention of a model while it trains, warns, and switches heads to a safe kernel."""

from foreshock.monitor.agent import Agent
from foreshock.monitor.attach import attach, detach
from foreshock.monitor.config import AgentConfig

__all__ = ["Agent", "AgentConfig", "attach", "detach"]
