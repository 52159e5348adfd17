"""Does the candidate still compute the same thing? Gates, their yardsticks, and mutants that prove their power."""
