"""Gives a job a separate network, which nothing outside can reach.

TensorFlow's ports accept every connection, without any check. See
https://github.com/tensorflow/tensorflow/blob/master/SECURITY.md, and network_namespaces(7).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

from tfmulti.errors import ConfigError

_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000  # linux/sched.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1  # linux/sockios.h, linux/if.h


def isolate() -> None:
    """Puts this process, and every process it starts later, into a network with loopback alone.

    Call it before any thread is started. A process that does not run as root needs a system that
    allows user namespaces.

    Raises:
        ConfigError: the system does not allow a network namespace.
    """
    user, group = os.geteuid(), os.getegid()
    try:
        if user == 0:
            _unshare(_CLONE_NEWNET)
        else:
            # A new user namespace gives the right to make a network namespace. The maps keep the
            # numbers of the user and the group; the group's map is refused unless setgroups is
            # denied first, see user_namespaces(7).
            _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _begin_loopback()
    except OSError as error:
        raise ConfigError(
            f"--isolate: this system does not allow a separate network ({error.strerror}). Run "
            "it as root, allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or "
            "close TensorFlow's ports with a firewall."
        ) from None


def _unshare(flags: int) -> None:
    """Moves this process into new namespaces, see unshare(2); raises OSError if that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _begin_loopback() -> None:
    """Switches on the loopback interface, which is off in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", 0)
        reply = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        flags = struct.unpack("16sH14x", reply)[1] | _IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))
