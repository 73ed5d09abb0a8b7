"""Knowledge conflicts as data: examples, judging, and examples from a user's own rows."""
