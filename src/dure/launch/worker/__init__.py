"""Process of one rank: its start, its stacks and replies while it runs, and its report."""
