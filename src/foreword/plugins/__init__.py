"""Plug-ins: other engines use our core and stores as their outer cache. One file or folder each."""
