"""Which workers there are, what they hold, and which of them a request gets, and when."""
