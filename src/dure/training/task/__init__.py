"""The user's task: loading, options, identity."""
