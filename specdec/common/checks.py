"""Checks of numbers that users give, with the message that names the setting."""

from collections.abc import Mapping

__all__ = ["check_at_least"]


def check_at_least(least: int, settings: Mapping[str, float | None]) -> None:
    """Raise ValueError, by name, for a setting below `least` or NaN; None is a setting that was not given."""
    for name, value in settings.items():
        if value is not None and not value >= least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
