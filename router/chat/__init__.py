"""Chat: messages to a prompt by the model's template, and what the model writes taken apart."""
