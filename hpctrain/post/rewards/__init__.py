"""What completions of prompts are worth: by what is right, a pattern, or a function of the user's own."""
