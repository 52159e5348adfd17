"""Does the candidate still compute the same thing? Gates, their yardsticks, and the protocol that applies them."""
