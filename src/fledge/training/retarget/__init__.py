"""Adapts a draft to a changed target: refits its input map in closed form, then may train it."""
