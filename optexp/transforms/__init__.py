"""Transforms of a model or a step that strategies share: graphs, lanes, chunks, patterns."""
