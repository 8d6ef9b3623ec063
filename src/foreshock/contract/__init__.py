"""What the agent, the kernels, the service and the dashboards agree on. No torch, no web framework."""
