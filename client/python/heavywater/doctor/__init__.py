"""Looks for what would keep Heavywater from running here, or from being reached."""
