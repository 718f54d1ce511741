"""Predicts, before anything runs, the time, memory and number of machines that training needs."""
