"""User's task: loading, options, identity."""
