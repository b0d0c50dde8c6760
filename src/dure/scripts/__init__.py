"""Looks at scripts of users: what their source gets wrong, and what their ranks compute."""
