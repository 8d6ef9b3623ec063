"""A folder that only this user can write to, and its files, opened so that other users cannot change them.

It may be in a world-writable folder (/var/tmp), so another user may have created it first, or put links into it. A user
who can rename a parent folder can at most redirect the agent to another private folder of this user. There the agent
creates its own files, and does not change any others.
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
_FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # open must not block on a planted FIFO


class PrivateFolder:
    """An open folder whose files are accessed through its descriptor, even if its path changes later.

    Raises PermissionError, with a sentence in `strerror`, for a folder of another user, a folder that others may write
    to, and a link. Every method may raise OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        for missing in [each for each in (*reversed(path.parents), path) if not each.exists()]:
            with suppress(FileExistsError):
                missing.mkdir(mode=0o700)  # with `parents=True`, the umask would decide their mode
        self._fd = _opened(path, path, _FOLDER)

    def open_locked(self, name: str, seconds: float, create: int = 0) -> int:
        """Open and lock a regular file of this user. Retry for `seconds`, because another process may remove the file.

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
        """Return the names in the folder, sorted."""
        return sorted(os.listdir(self._fd))

    def remove(self, name: str) -> None:
        """Unlink a file, if it still exists."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def close(self) -> None:
        """Close the descriptor; the folder cannot be used any more."""
        os.close(self._fd)


def refused(path: Path, why: str) -> PermissionError:
    """Return the error for a file or folder that the agent does not use."""
    return PermissionError(errno.EPERM, f"{path} {why}", str(path))


def _opened(name: Path | str, path: Path, flags: int, place: int | None = None) -> int:
    """Open `name` and check that it belongs to this user and is private; errors contain `path`."""
    try:
        fd = os.open(name, flags, 0o600, dir_fd=place)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
            raise
        kind = "folder" if flags & os.O_DIRECTORY else "regular file"
        raise refused(path, f"is not a {kind}; links are not followed") from None
    why = _not_private(os.fstat(fd))
    if why is not None:
        os.close(fd)
        raise refused(path, why)
    return fd


def _not_private(found: os.stat_result) -> str | None:
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()} of this process; set another folder"
    if found.st_mode & 0o022:
        return f"may be written to by others (mode {stat.S_IMODE(found.st_mode):o}); chmod go-w it, or set another"
    if stat.S_ISDIR(found.st_mode):
        return None
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    return "has a second name, a hard link" if found.st_nlink > 1 else None
