"""How long a training takes, what memory it needs, how many machines: before anything runs."""
