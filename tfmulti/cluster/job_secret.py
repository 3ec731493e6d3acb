"""Reads the secret of a job, and lets two processes prove to each other that they know it.

The secret comes from TFMULTI_SECRET, or from a file that only this user can read. It is never sent.
Each side sends random bytes, the nonce. The other side answers with an HMAC-SHA256 of the nonce,
whose key is the secret. An attacker who reads the connection does not learn the secret, and cannot
use the messages again, because each connection has other nonces.

Sources: RFC 2104 for HMAC, ISO/IEC 9798-4 (three passes) for the exchange of nonces.
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
# Without O_NONBLOCK, opening a named pipe would wait for a program that writes to it.
_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_HOW_TO_MAKE = "Make one: python -c 'import secrets; print(secrets.token_hex())'."


def secret_of(env: Mapping[str, str], path: Path | None = None) -> str:
    """Returns the secret from the environment or a file, or an empty text if neither gives one.

    Args:
        env: the environment, which may hold TFMULTI_SECRET.
        path: the file of `--secret-file`, or None.

    Raises:
        ConfigError: the environment and a file are both given, or the secret has a wrong length or
            characters that cannot be printed. Also if the file cannot be read, or if other users
            can read or write it.
    """
    secret, source = env.get(SECRET, "").strip(), SECRET
    if path is not None:
        if secret:
            raise ConfigError(f"{SECRET} and --secret-file are both given. Give one of them.")
        secret, source = _content(path), f"--secret-file {path}"
    if not secret.isprintable():
        raise ConfigError(f"{source}: a secret has letters, digits and signs alone. {_HOW_TO_MAKE}")
    if (secret or path is not None) and not LEAST <= len(secret) <= MOST:
        raise ConfigError(
            f"{source}: a secret has {LEAST} to {MOST} characters, but this has {len(secret)}. "
            f"{_HOW_TO_MAKE}"
        )
    return secret


def _content(path: Path) -> str:
    """Returns the text of a secret's file, or raises ConfigError."""
    source = f"--secret-file {path}"
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _FLAGS)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{source} is not a file. {_HOW_TO_MAKE}")
            if status.st_mode & 0o077 or status.st_uid not in (os.getuid(), 0):
                raise ConfigError(
                    f"{source} can be read or written by others (mode "
                    f"{status.st_mode & 0o777:04o}). Run: chmod 600 {path}"
                )
            return file.read(MOST + 2).decode().strip()
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}. {_HOW_TO_MAKE}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{source} is not UTF-8 text. {_HOW_TO_MAKE}") from None


def nonce() -> bytes:
    """Returns NONCE_BYTES random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, *parts: bytes) -> bytes:
    """Returns the HMAC-SHA256 of the parts, PROOF_BYTES bytes that only owners of the key can make.

    Each part is preceded by its length, so other parts with the same joined bytes give another
    proof.
    """
    text = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    return hmac.digest(key, text, "sha256")


def is_proof(received: bytes, key: bytes, *parts: bytes) -> bool:
    """Returns whether `received` is the proof of these parts.

    The comparison takes the same time for every wrong proof, so its time tells an attacker nothing.
    """
    return hmac.compare_digest(received, proof(key, *parts))


class MessageAuthenticator:
    """Signs the messages that one side of a connection sends, and checks those that it receives.

    Each signature covers the number of its message. So the check fails for a message that was
    changed, repeated or moved, or that follows a missing message.

    Args:
        sending_key: the key of the messages that this side sends, for this connection alone.
        receiving_key: the key of the messages that this side receives, for this connection alone.
    """

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        self._sending_key, self._receiving_key = sending_key, receiving_key
        self._sent = self._received = 0

    def signature_of(self, message: bytes) -> bytes:
        """Returns the signature of the next message to send, in hexadecimal."""
        self._sent += 1
        return proof(self._sending_key, struct.pack("<Q", self._sent), message).hex().encode()

    def is_valid(self, signature: bytes, message: bytes) -> bool:
        """Returns whether a signature is that of a message, which is the next one received."""
        self._received += 1
        number = struct.pack("<Q", self._received)
        expected = proof(self._receiving_key, number, message).hex().encode()
        return hmac.compare_digest(signature, expected)
