"""API keys: who may call, and whose cache a call uses."""

import hmac
from collections.abc import Sequence
from hashlib import sha256

from foreword.server.errors import ApiError


class Tenants:
    """One tenant per key. Without keys everybody is the same tenant."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in api_keys]

    def of(self, authorization: str | None) -> str:
        """The tenant of an Authorization header: what its requests' cache salts begin with. Raises
        ApiError (401) for a key that is missing or not known."""
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                "This server asks for an API key: send 'Authorization: Bearer KEY'.",
                code="missing_api_key",
                status=401,
            )
        digest = sha256(key.strip().encode()).digest()
        # All are compared, each in constant time: how long it takes tells nothing.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise ApiError("This API key is not known here.", code="invalid_api_key", status=401)
        return tenant_of(key.strip())


def shown(salt: str, tenant: str) -> str:
    """A cache salt as others may see it. With keys it begins with eight digits of its key's
    SHA-256, which who has the key can compute; `tenant` says whether there are keys."""
    key, _, own = salt.partition(":") if tenant else ("", "", salt)
    return key[:8] + (f":{sha256(own.encode()).hexdigest()[:8]}" if own else "")


def tenant_of(api_key: str) -> str:
    """What the cache salts of a key's requests begin with; the key cannot be told from it."""
    return sha256(api_key.encode()).hexdigest()[:32]
