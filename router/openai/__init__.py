"""OpenAI's API: bodies checked, made into requests, and answers in its shapes."""
