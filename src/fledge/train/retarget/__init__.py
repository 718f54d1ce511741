"""A draft for a target that was changed: its map refitted in closed form, then perhaps trained."""
