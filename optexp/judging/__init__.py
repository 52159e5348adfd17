"""Many candidates judged against their references: problems, jobs, result lines, fast_p. See docs/judge.md."""
