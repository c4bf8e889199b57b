"""Paths of the server beside completions, chats and responses. Imported only where FastAPI is installed."""
