"""The `heavywater` command."""
