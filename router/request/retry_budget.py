"""How many attempts may be made again, over all requests."""

_PER_REQUEST = 0.2


class RetryBudget:
    """Full at first; each request brings a fifth of an attempt, each attempt made again takes one.

    A worker that dies takes the attempts of everything that ran there, which a full budget covers.
    When everything fails, and goes on failing, the system is spared two thirds of the load.
    """

    def __init__(self, most: int) -> None:
        self._most = float(most)
        self._left = float(most)

    def add_request(self) -> None:
        self._left = min(self._left + _PER_REQUEST, self._most)

    def take(self) -> bool:
        """Whether another attempt may be made, which is then accounted for."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
