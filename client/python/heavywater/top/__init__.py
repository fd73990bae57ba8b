"""What runs now: figures of a deployment, taken again and again."""
