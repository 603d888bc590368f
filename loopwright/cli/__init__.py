"""The `loopwright` command."""
