"""What comes from TRL's Python side: scripts into recipes, and the objects that its trainer takes into fields."""
