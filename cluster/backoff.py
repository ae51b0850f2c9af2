"""How long to wait before starting again what has died."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Pauses between restarts of one process. It owns one counter, the deaths in a row that came
    within `stable_s` of the start; a longer life forgives them all. Pauses double from `first_s`
    and never exceed `longest_s`; from `loop_deaths` on it is a crash loop and each is the longest.
    """

    first_s: float = 0.2
    longest_s: float = 30.0
    stable_s: float = 20.0
    loop_deaths: int = 5
    quick_deaths: int = 0

    @property
    def is_crash_loop(self) -> bool:
        return self.quick_deaths >= self.loop_deaths

    def after_death(self, lived_s: float) -> float:
        """Counts one death and returns the pause, in seconds, before the next start."""
        self.quick_deaths = 1 if lived_s >= self.stable_s else self.quick_deaths + 1
        if self.is_crash_loop:
            return self.longest_s
        return min(self.longest_s, self.first_s * 2 ** (self.quick_deaths - 1))
