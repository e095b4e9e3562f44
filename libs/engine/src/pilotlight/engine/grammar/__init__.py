"""Structured output: which tokens a grammar allows next.

::

    engine (step loop) ──Open, Advance, Close──> helper process: llguidance, vocabularies, a matcher for each request
                       <──────── Verdict ───────     └── fork: tries a new grammar first, and dies with it if it is a bomb

A process, not a thread: loading a vocabulary of 150,000 tokens holds the interpreter for a second,
and some schemas of a few hundred bytes make the library take all memory and abort. The helper holds
nothing that cannot be made again: a matcher is a function of grammar and output, so when it dies it
is replaced, and the requests go on.
"""
