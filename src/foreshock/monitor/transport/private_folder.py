"""A folder that belongs to this user alone, and its files, opened so that no other user can change them.

It may lie where everybody writes (/var/tmp), so somebody else may have made it first, or put links into it. Who may
rename a folder above it can at most lead the agent to another folder of this user that is closed to others. There the
agent makes files of its own, and touches no other.
"""

import errno
import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a planted fifo must not hold the open up


class PrivateFolder:
    """An open folder whose files are reached through its descriptor, wherever its path leads later.

    Raises PermissionError, with a sentence in `strerror`, for a folder of another user, one that others may write to,
    and a link; every method may raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        for missing in [each for each in (*reversed(path.parents), path) if not each.exists()]:
            with suppress(FileExistsError):
                missing.mkdir(mode=0o700)  # `parents=True` would leave these to the umask
        self._fd = _opened(path, path, _FOLDER)

    def open_locked(self, name: str, seconds: float, create: int = 0) -> int:
        """Open and lock a regular file of this user, trying for `seconds`: meanwhile another process may remove it.

        create: os.O_CREAT or 0. Raises PermissionError for any other kind of file.
        """
        deadline = time.monotonic() + seconds
        while True:
            fd = _opened(name, self.path / name, _FILE | create, self._fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=self._fd, follow_symlinks=False)):
                    return fd
                raise FileNotFoundError(errno.ENOENT, "another process removed it", str(self.path / name))
            except (BlockingIOError, FileNotFoundError):
                os.close(fd)
                if time.monotonic() >= deadline:
                    raise
            except OSError:
                os.close(fd)
                raise
            time.sleep(0.005)

    def names(self) -> list[str]:
        """What lies in it, sorted."""
        return sorted(os.listdir(self._fd))

    def remove(self, name: str) -> None:
        """Unlink a file, if it is still there."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        """Close the descriptor; nothing can be reached through it any more."""
        os.close(self._fd)


def refused(path: Path, why: str) -> PermissionError:
    """What is raised for something that the agent leaves alone."""
    return PermissionError(errno.EPERM, f"{path} {why}", str(path))


def _opened(name: Path | str, path: Path, flags: int, place: int | None = None) -> int:
    """A descriptor of what is there under `name`, proven to be this user's own; `path` is what errors call it."""
    try:
        fd = os.open(name, flags, 0o600, dir_fd=place)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise
        kind = "folder" if flags & os.O_DIRECTORY else "regular file"
        raise refused(path, f"is no {kind}; a link is not followed") from None
    why = _not_private(os.fstat(fd))
    if why is not None:
        os.close(fd)
        raise refused(path, why)
    return fd


def _not_private(found: os.stat_result) -> str | None:
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()} of this process; name a folder of its own"
    if found.st_mode & 0o022:
        return f"may be written to by others (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w it, or name another"
    if stat.S_ISDIR(found.st_mode):
        return None
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    return "has a second name, a hard link" if found.st_nlink > 1 else None
