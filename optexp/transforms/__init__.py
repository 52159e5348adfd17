"""What several strategies do to a model or a step: graphs, lanes, chunks, patterns."""
