"""Routes other than completions, chats and responses. Import only where FastAPI is installed."""
