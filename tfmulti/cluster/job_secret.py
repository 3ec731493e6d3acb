"""The secret that all processes of a job know, and how two of them prove that they do.

It is read from TFMULTI_SECRET or from a file of this user's alone, and never sent: each side
answers the other's random bytes (a nonce) with an HMAC-SHA256 keyed with it, so neither who listens
nor who repeats what was said learns or proves anything. See RFC 2104, and for the exchange of
nonces ISO/IEC 9798-4 (three passes).
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

from tfmulti.errors import ConfigError

SECRET = "TFMULTI_SECRET"
LEAST, MOST = 16, 4096  # characters
NONCE_BYTES, PROOF_BYTES = 16, 32
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK  # who gives a named pipe waits for nobody
_HOW = "Make one: python -c 'import secrets; print(secrets.token_hex())'."


def secret_of(env: Mapping[str, str], path: Path | None = None) -> str:
    """Returns the secret that the environment or a file holds; empty: there is none.

    Raises:
        ConfigError: both are given, it is too short, or others could read the file.
    """
    found, place = env.get(SECRET, "").strip(), SECRET
    if path is not None:
        if found:
            raise ConfigError(f"{SECRET} and --secret-file are both given. Give one of them.")
        found, place = _content(path), f"--secret-file {path}"
    if not found.isprintable():
        raise ConfigError(f"{place}: a secret has letters, digits and signs alone. {_HOW}")
    if (found or path is not None) and not LEAST <= len(found) <= MOST:
        raise ConfigError(
            f"{place}: a secret has {LEAST} to {MOST} characters, but this has {len(found)}. {_HOW}"
        )
    return found


def made() -> str:
    """Returns a secret that nobody can guess."""
    return secrets.token_hex()


def _content(path: Path) -> str:
    place = f"--secret-file {path}"
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _FLAGS)) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"{place} is no file. {_HOW}")
            if about.st_mode & 0o077 or about.st_uid not in (os.getuid(), 0):
                raise ConfigError(
                    f"{place} can be read or written by others (mode {about.st_mode & 0o777:04o}). "
                    f"Run: chmod 600 {path}"
                )
            return file.read(MOST + 2).decode().strip()
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}. {_HOW}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{place} is not UTF-8 text. {_HOW}") from None


def nonce() -> bytes:
    """Returns NONCE_BYTES random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, *parts: bytes) -> bytes:
    """Returns PROOF_BYTES bytes which only who knows the key can compute from the parts.

    The parts cannot be confused with others: each goes in with its length.
    """
    text = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hmac.digest(key, text, "sha256")


def is_proof(given: bytes, key: bytes, *parts: bytes) -> bool:
    """Whether that is the proof of these parts; takes the same time for any that is not."""
    return hmac.compare_digest(given, proof(key, *parts))


class MessageAuthenticator:
    """Signs the messages of one direction of a connection, and checks those of the other.

    A message that was changed, left out, repeated, or put elsewhere does not pass.

    Args:
        sends, takes: the keys of the directions, of this connection alone.
    """

    def __init__(self, sends: bytes, takes: bytes) -> None:
        self._sends, self._takes = sends, takes
        self._sent = self._taken = 0

    def signed(self, message: bytes) -> bytes:
        """Returns the proof of the next message that is sent, in hexadecimal."""
        self._sent += 1
        return proof(self._sends, struct.pack("<Q", self._sent), message).hex().encode()

    def passes(self, sign: bytes, message: bytes) -> bool:
        """Whether that is the proof of the next message that comes."""
        self._taken += 1
        expected = proof(self._takes, struct.pack("<Q", self._taken), message).hex().encode()
        return hmac.compare_digest(sign, expected)
