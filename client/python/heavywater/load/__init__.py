"""Load on running servers: what is asked, what came of it, and what was left behind."""
