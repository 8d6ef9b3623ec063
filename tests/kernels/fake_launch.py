"""A replacement for Hopper kernels on machines without a Hopper GPU."""


class FakeLaunch:
    """Records its launches, or raises `failure`: an ImportError when the kernel is loaded, others at its launch."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.launched: list[str] = []
        self.failure = failure

    def kernel(self) -> object:
        if isinstance(self.failure, ImportError):
            raise self.failure

        def launch(*_: object) -> None:
            if self.failure is not None:
                raise self.failure
            self.launched.append("hopper")

        return launch
