"""What stands in for a kernel of Hopper's own where there is no such GPU."""


class StandInLaunch:
    """Keeps that it was launched, or raises a failure: an ImportError where it is asked for, others at its launch."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.made: list[str] = []
        self.failure = failure

    def kernel(self) -> object:
        if isinstance(self.failure, ImportError):
            raise self.failure

        def launched(*_: object) -> None:
            if self.failure is not None:
                raise self.failure
            self.made.append("hopper")

        return launched
