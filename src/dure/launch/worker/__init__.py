"""Process of one rank, from its start to the verdict about its end."""
