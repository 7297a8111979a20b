"""OpenAI's Responses and Conversations: stored, chained, in the background, resumable."""
