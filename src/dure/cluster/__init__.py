"""Ranks and hosts as clusters' launchers describe them."""
