"""Forecasts the length that a run will reach, from its own curve and from finished runs."""
