"""Foreword: KV-cache reuse for LLM serving. Never prefill twice."""

__version__ = "0.1.0"
