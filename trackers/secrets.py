"""Which values of a configuration are secrets, and must not reach a tracker."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

HIDDEN = "***"
"""What stands in place of a secret."""

# fmt: off
_SECRET_WORDS = frozenset([
    "password", "passwd", "passphrase", "passcode", "pwd", "secret", "secrets", "credential", "credentials",
    "authorization", "apikey", "accesskey", "secretkey", "privatekey", "apitoken", "accesstoken", "authtoken"
])
_BEFORE_KEY = frozenset([
    "api", "access", "secret", "private", "auth", "account", "encryption", "signing", "ssh"
])
# Words before "token" that speak of a vocabulary and not of access.
_VOCABULARY = frozenset([
    "pad", "eos", "bos", "unk", "mask", "cls", "sep", "sot", "eot", "start", "end", "stop", "special", "decoder",
    "prefix", "suffix", "middle", "image", "audio", "video", "separator", "begin", "per", "newline", "blank"
])
# fmt: on
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_URL_PASSWORD = re.compile(r"(://[^\s/:@]*):[^\s/@]+@")


def is_secret(key: str, value: Any) -> bool:
    """Whether the value under `key` is hidden, judged by the words of the key: "api_key", "hfToken", "DB_PASSWORD".

    None, booleans and empty texts hide nothing and are shown; so is a "token" that is a number or one of a
    vocabulary ("pad_token").
    """
    is_empty = isinstance(value, str | bytes) and not value
    if value is None or isinstance(value, bool) or is_empty:
        return False
    words = [word.lower() for word in _WORD.findall(key)]
    last = words[-1:]
    is_key = any(first in _BEFORE_KEY and second == "key" for first, second in pairwise(words))
    is_token = last == ["token"] and isinstance(value, str | bytes) and _VOCABULARY.isdisjoint(words[-2:-1])
    return is_key or is_token or last == ["auth"] or not _SECRET_WORDS.isdisjoint(words)


def hide_passwords(text: str) -> str:
    """The text with the password of each URL in it hidden: "s3://user:***@host"."""
    return _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", text)
