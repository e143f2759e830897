"""A policy of one's own: shorten the longest run of free slices as little as possible."""

from slicewise import Geometry, Profile, ScorePolicy


class Tidy(ScorePolicy):
    """Scores a placement by how much it cuts off the longest free run; ties go to fuller GPUs."""

    name = "tidy"
    summary = "Shortens the longest run of free slices least, on the fullest such GPU."

    def score(self, geometry: Geometry, profile: Profile, mask: int, start: int) -> tuple[int, int]:
        """Lower is better."""

        def longest_run(taken: int) -> int:
            return max(map(len, geometry.mask_text(taken).split("1")))

        lost = longest_run(mask) - longest_run(mask | profile.window(start))
        return lost, -mask.bit_count()
