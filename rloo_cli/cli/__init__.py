"""One file a command: parse, call, print. Nothing heavy is imported before the recipe is valid."""
