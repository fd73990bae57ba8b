"""What keeps a deployment from working, found from where the command runs."""
