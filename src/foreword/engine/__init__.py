"""Turn scheduled requests into tokens with torch, from paged KV."""
