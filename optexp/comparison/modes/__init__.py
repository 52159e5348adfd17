"""Modes: each file here is one, found by its name. `mode=<name>` runs its `run(session, facts, meanwhile)`.

    session:    the experiment, its machine and its result, which the mode fills in
    facts:      what the mode found out, for the verdict
    meanwhile:  work of the parent, done while the first arms set up
    returns:    the verdict; None where `adjudicate(facts)` finds it

Raises what `adjudicate` knows: Unsupported, NoReference, ConfigError, Distrusted, Failure.
"""
