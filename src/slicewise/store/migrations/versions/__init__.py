"""The migrations, one per module."""
