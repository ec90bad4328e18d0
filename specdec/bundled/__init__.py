"""Models that go by a name (the tiny one ships, the chat model is fetched), their drafters, and what loads them."""
