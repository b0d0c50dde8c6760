"""Rules of `dure lint`, by subject: each is a function from the facts of a project to its reports."""
