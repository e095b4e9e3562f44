"""Other shapes of the same answers: routes beside OpenAI's completions, over the same core."""
