"""What length a run will reach: from its own curve, and from runs that are known to their end."""
