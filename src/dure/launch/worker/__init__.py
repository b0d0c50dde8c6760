"""Process of one rank: its start, its stacks and answers while it runs, and what it leaves behind."""
