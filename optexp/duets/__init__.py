"""Two programs beside each other: commits of the user's repository, environments, or any two commands."""
