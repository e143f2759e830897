"""An example policy: keep the longest run of free slices as long as possible."""

from slicewise import Geometry, Profile, ScorePolicy


class Tidy(ScorePolicy):
    """Minimize the loss of the longest free run; prefer fuller GPUs among equals."""

    name = "tidy"
    summary = "Keeps the longest run of free slices; prefers fuller GPUs."

    def score(self, geometry: Geometry, profile: Profile, mask: int, start: int) -> tuple[int, int]:
        """Return the cost of a placement; lower is better."""

        def longest_run(taken: int) -> int:
            return max(map(len, geometry.mask_text(taken).split("1")))

        lost = longest_run(mask) - longest_run(mask | profile.window(start))
        return lost, -mask.bit_count()
