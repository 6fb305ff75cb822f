"""Speak the OpenAI HTTP API to anything that can generate."""
