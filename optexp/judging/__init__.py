"""Many implementations judged against their references: suites of problems, jobs, lines, fast_p. See docs/judge.md."""
