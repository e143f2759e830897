"""An example policy: keep the longest run of free slices as long as possible."""

from slicewise import GpuState, Profile, ScorePolicy


class Tidy(ScorePolicy):
    """Minimize the loss of the longest free run; prefer fuller GPUs among equals."""

    name = "tidy"
    summary = "Keeps the longest run of free slices; prefers fuller GPUs."

    def score(self, gpu: GpuState, profile: Profile, start: int) -> tuple[int, int]:
        """Return the cost of a placement; lower is better."""

        def longest_run(taken: int) -> int:
            return max(map(len, gpu.geometry.mask_text(taken).split("1")))

        lost = longest_run(gpu.mask) - longest_run(gpu.mask | profile.window(start))
        return lost, -gpu.mask.bit_count()
