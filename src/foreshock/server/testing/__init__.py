"""For tests and benchmarks of a checkout, and no part of a wheel: a real service, and batches as a rank sends them."""

from foreshock.server.testing.service import AnsweringAgent, FakeRank, LiveService, post

__all__ = ["AnsweringAgent", "FakeRank", "LiveService", "post"]
