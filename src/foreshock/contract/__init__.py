"""Definitions shared by the agent, the kernels, the service and the dashboards. Imports neither torch nor FastAPI."""
