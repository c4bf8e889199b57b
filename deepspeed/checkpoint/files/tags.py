"""Valid tags of checkpoints, and the file ``latest`` that names one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError, CheckpointTagError
from deepspeed.checkpoint.names import LATEST, LATEST_UNIVERSAL, SCRIPTS

_OUR_OWN = re.compile(r"\..+\.(tmp|old|lock|removed)")
"""Hidden folders and files of a save in progress."""

_MAX_LATEST_BYTES = 4096
_MAX_NAME_BYTES = 255
_SHOWN = 80


def given_tag(tag: object) -> str:
    """Return the tag that a caller gave, without the slash that the completion of a folder's name leaves."""
    return str(tag).rstrip("/") or str(tag)


def check_tag(tag: str, *, source: str = "the checkpoint tag") -> str:
    """Return ``tag`` if it names a folder inside the checkpoint folder: a name, or several separated by slashes.

    CheckpointTagError: it does not; the message names the problem and the ``source`` of the tag.
    """
    problem = _problem(tag)
    if problem is not None:
        raise CheckpointTagError(
            f"{source} {shown(tag)} {problem}: a tag is the name of a folder inside save_dir, such as "
            "'global_step100' or 'epoch1/step5'"
        )
    return tag


def shown(tag: str) -> str:
    """Return ``tag`` for a message, truncated: a file that should hold a tag may hold anything."""
    return repr(tag) if len(tag) <= _SHOWN else f"{tag[:_SHOWN]!r}..."


def _problem(tag: str) -> str | None:
    if not tag:
        return "is empty"
    if any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in tag):
        return "contains a control character or an unpaired surrogate"
    if tag.startswith("/") or (os.name == "nt" and ("\\" in tag or ":" in tag)):
        return "is an absolute path"
    for name in tag.split("/"):
        if name in ("", ".", ".."):
            return f"has {name!r} as a path component"
        if name != name.strip():
            return "starts or ends with a space"
        if len(os.fsencode(name)) > _MAX_NAME_BYTES:
            return f"has a component of {len(os.fsencode(name))} bytes; file names have at most {_MAX_NAME_BYTES}"
        if _OUR_OWN.fullmatch(name):
            return "looks like the folder of an unfinished save"
    if tag in (LATEST, LATEST_UNIVERSAL, *SCRIPTS):
        return "is the name of a file stored next to the checkpoints"
    return None


def read_latest(load_dir: Path, name: str = LATEST) -> str | None:
    """Return the tag in the file ``name``; None if there is no such file. CheckpointError: the file does not hold a
    tag."""
    path = load_dir / name
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_LATEST_BYTES)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise CheckpointNotFoundError(f"{load_dir} is a file, not a folder of checkpoints") from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{path} is a folder, not a file with a tag. {_REMEDY}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}. {_REMEDY}") from error
    try:
        tag = given_tag(content.decode().strip())
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} does not hold a tag: it starts with {content[:20]!r}, which is not text. {_REMEDY}"
        ) from error
    if not tag:
        raise CheckpointError(f"{path} is empty: it should hold the last saved tag. {_REMEDY}")
    return check_tag(tag, source=f"{path} names")


_REMEDY = "Pass tag=, or write the name of a checkpoint folder into that file"
