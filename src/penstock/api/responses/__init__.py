"""OpenAI's Responses and Conversations: answers that are kept, followed up and resumed."""
